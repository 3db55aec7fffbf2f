"""Field: the cells of a partition with their arms, the rewards told, and what is believed of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsekit.bandit.cells import Cells, grid
from sparsekit.bandit.posterior import Posterior
from sparsekit.bandit.rule import Rule
from sparsekit.bandit.smoothness import Evidence, Floats, correlation, first, redraw, squared_gaps
from sparsekit.errors import InvalidValueError

__all__ = ["Field"]

_ARRAYS = ("points", "weights", "rewards", "pulls", "first", "dropped")
_SUMS = ("told", "within", "replicates", "level", "since", "due", "begin")

# With a discount, an arm of which less than this is left says next to nothing, and would only slow the search down.
_FADED = 0.1


# Signal variances whose logarithms differ by less are taken for the same.
_SAME_SIGNAL = 0.1


class Field:
    """Cells, arms and posterior of a `SplitUCBV`, in the unit cube. Arm k lies in cell k."""

    def __init__(self, axes: int, *, discount: float, rng: np.random.Generator, rule: Rule | None = None) -> None:
        """Cut the cube into a few equal cells, in random order, each with an arm near its middle.

        Args:
            axes: Of the cube.
            discount: Share of what is known that survives a reward, in (0, 1].
            rng: Draws the order and the arms.
            rule: The numbers of the index.
        """
        self.rule = rule or Rule()
        self.discount = discount
        boxes = grid(self.rule.line if axes == 1 else self.rule.cube, axes)
        boxes = [boxes[place] for place in rng.permutation(len(boxes)).tolist()]
        capacity = max(self.rule.capacity, 4 * len(boxes))
        self.cells = Cells(boxes, capacity)
        self.points: Floats = np.zeros((capacity, axes))
        self.weights: Floats = np.zeros(capacity)
        self.rewards: Floats = np.zeros(capacity)
        self.pulls: npt.NDArray[np.int64] = np.zeros(capacity, dtype=np.int64)
        # The first told pull of each arm, as its place among all told.
        self.first: npt.NDArray[np.int64] = np.full(capacity, -1, dtype=np.int64)
        self.dropped: npt.NDArray[np.bool_] = np.zeros(capacity, dtype=np.bool_)
        self.drops = False
        self.variation: Floats = np.zeros(capacity)
        for arm in range(len(boxes)):
            self.points[arm] = self.middle(arm, rng)
        self.posterior: Posterior | None = None
        self.told = 0.0
        self.within = 0.0
        self.replicates = 0.0
        self.level = 0.0
        self.since = self.due = 0.0
        self.begin = float(len(boxes))
        # Open pulls: the arm of each, -1 where it stands no more.
        self.open: dict[int, int] = {}

    @property
    def full(self) -> bool:
        """Whether cells must be merged before any are split; a reward may need two new ones."""
        return self.cells.size + 2 > len(self.points)

    def middle(self, cell: int, rng: np.random.Generator) -> Floats:
        """A point drawn from the middle part of a cell."""
        low, high = self.cells.low[cell], self.cells.high[cell]
        point: Floats = low + (high - low) * (0.5 + self.rule.jitter * (rng.random(len(low)) - 0.5))
        return point

    # --- what is believed ---

    def refresh(self, rng: np.random.Generator) -> None:
        """Draw the smoothness anew and compute the posterior from all rewards."""
        size, prior = self.cells.size, self.rule.prior
        weights = self.weights[:size]
        pulled = np.flatnonzero(weights > (_FADED if self.discount < 1.0 else 0.0))
        if not len(pulled):
            pulled = np.flatnonzero(weights == weights.max())
        means = self.rewards[pulled]
        level = float(means.mean())
        means = means - level
        # Equal rewards have no scale; any will do.
        spread = float(means.var()) or float(np.square(means).max()) or 1.0
        evidence = Evidence(
            squared_gaps(self.points[pulled]), means, self.weights[pulled], self.within, self.replicates, spread
        )
        self.since, self.due = 0.0, self.rule.refresh * self.told
        known = self.posterior
        before = first(evidence, prior) if known is None else known.smoothness
        smoothness, signal = redraw(before, evidence, prior, moves=self.rule.moves, rng=rng)
        if known is not None and smoothness is before and abs(math.log(signal / known.signal)) < _SAME_SIGNAL:
            # What each reward has changed by itself is exact while these stay.
            return
        self.level = level
        self.posterior = posterior = known or Posterior(len(self.points), self.points.shape[1], drifts=self.discount < 1.0)
        posterior.set_smoothness(smoothness, signal)
        posterior.rebuild(self.points[:size], self.rewards[:size] - level, weights)
        self.variation[:size] = self.variations(posterior, slice(0, size))

    def variations(self, posterior: Posterior, cells: slice) -> Floats:
        """How far the function may vary from the middle of each cell to its corners, as a variance."""
        halves = 0.5 * (self.cells.high[cells] - self.cells.low[cells]) / posterior.lengths
        diagonals = np.sqrt(np.square(halves).sum(axis=1))
        return 2.0 * posterior.signal * (1.0 - correlation(diagonals, posterior.smoothness.order))

    def indices(self, pending: Mapping[int, int]) -> Floats:
        """The index of each arm, float (arms,); those of dropped cells are -inf.

        Args:
            pending: Arms of open pulls, and how often each is open.
        """
        size, rule = self.cells.size, self.rule
        if self.posterior is None:
            # Nothing is known yet: the arms in turn.
            index: Floats = -self.pulls[:size].astype(np.float64)
            for arm, times in pending.items():
                index[arm] -= times
        else:
            means, variances = self.posterior.means[:size], self.posterior.variances[:size]
            if pending:
                variances = self.posterior.variances_with(pending)
            share = rule.variation + rule.growth * math.log(max(self.told, 1.0))
            # Rounding can leave a variance just below 0.
            index = means + np.sqrt(np.maximum(rule.certainty * variances, 0.0) + share * self.variation[:size])
        if self.drops:
            index[self.dropped[:size]] = -math.inf
        return index

    def settle(self, cell: int, new: int, point: Floats) -> None:
        """Put an arm into a cell that was just split off from another one."""
        posterior = self.posterior
        if posterior is not None:
            posterior.add(self.points[:new], point)
            for changed in (cell, new):
                self.variation[changed] = self.variations(posterior, slice(changed, changed + 1))[0]
        self.points[new] = point
        self.weights[new] = self.rewards[new] = self.pulls[new] = 0
        self.first[new] = -1
        self.dropped[new] = self.dropped[cell]

    # --- learning ---

    def learn(self, arm: int, reward: float, weight: float, place: int | None) -> None:
        """Take in one reward.

        Args:
            arm: Where it was got.
            reward: Any finite number.
            weight: How many rewards it counts for.
            place: Of the pull among all told; None for a reward that was only expected.
        """
        posterior, discount = self.posterior, self.discount
        if discount < 1.0:
            self.weights[: self.cells.size] *= discount
            self.told *= discount
            self.within *= discount
            self.replicates *= discount
        had, mean = float(self.weights[arm]), float(self.rewards[arm])
        if had > 0.0:
            self.within += (reward - mean) ** 2 * had * weight / (had + weight)
            # A mean that has faded is no better for it than it was, so its deviation tells less than its weight says.
            self.replicates += 1.0 if discount == 1.0 else min(1.0, 2.0 * had / (had + weight))
        self.weights[arm] = had + weight
        self.rewards[arm] = mean + (reward - mean) * (weight / (had + weight))
        self.told += 1.0
        self.since += 1.0
        self.pulls[arm] += 1
        if place is not None and self.first[arm] < 0:
            self.first[arm] = place
        if posterior is not None:
            if discount < 1.0:
                posterior.fade(discount)
            posterior.observe(arm, reward - self.level, weight)

    def expected(self, arm: int) -> float:
        """What is expected of an arm: its posterior mean, or the mean of all rewards so far."""
        if self.posterior is not None:
            return self.level + float(self.posterior.means[arm])
        seen = self.weights[: self.cells.size]
        return float(seen @ self.rewards[: self.cells.size] / seen.sum()) if seen.any() else 0.0

    def best(self) -> int:
        """The place, among all told, of the first pull of the arm that is best with some confidence."""
        size = self.cells.size
        if self.posterior is None:
            merit = self.rewards[:size].copy()
        else:
            merit = self.posterior.means[:size] - np.sqrt(np.maximum(self.posterior.variances[:size], 0.0))
        told = self.first[:size] >= 0
        merit[~told] = -math.inf
        standing = told & ~self.dropped[:size]
        if standing.any():
            merit[~standing] = -math.inf
        return int(self.first[int(merit.argmax())])

    def rows(self) -> list[tuple[float, float, int, float, float, float]]:
        """Of each cell that stands: low and high on the first axis, pulls, posterior mean and variance, index; from low up."""
        size = self.cells.size
        known = self.posterior is not None
        means = self.level + self.posterior.means[:size] if self.posterior is not None else self.rewards[:size]
        variances = np.maximum(self.posterior.variances[:size], 0.0) if self.posterior is not None else np.zeros(size)
        index = self.level + self.indices({}) if known else np.full(size, math.inf)
        columns = (self.cells.low[:size, 0], self.cells.high[:size, 0], self.pulls[:size], means, variances, index)
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        return sorted(row for row, dropped in zip(rows, self.dropped[:size].tolist(), strict=True) if not dropped)

    def knows(self, told: int) -> bool:
        """Whether the arms belong to so many told pulls."""
        places = self.first[: self.cells.size]
        return bool((places < told).all()) and (told == 0 or bool((places >= 0).any()))

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        size = self.cells.size
        return {
            "cells": self.cells.state_dict(),
            "arms": {name: getattr(self, name)[:size].tolist() for name in _ARRAYS},
            "sums": {name: getattr(self, name) for name in _SUMS},
            "open": [[id, arm] for id, arm in self.open.items()],
            "posterior": None if self.posterior is None else self.posterior.state_dict(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], axes: int, *, discount: float, rule: Rule | None = None) -> Field:
        """The field that `state_dict` described, to the bit.

        Raises:
            InvalidValueError: the numbers do not fit together.
        """
        made = cls(axes, discount=discount, rng=np.random.default_rng(0), rule=rule)
        capacity = len(made.points)
        made.cells = Cells.from_state(state["cells"], capacity)
        size = made.cells.size
        for name in _ARRAYS:
            values = np.array(state["arms"][name], dtype=getattr(made, name).dtype)
            if len(values) != size or not np.isfinite(values).all():
                raise InvalidValueError(f"{name} of a state must hold {size} finite numbers, one per arm")
            getattr(made, name)[:size] = values
        made.drops = bool(made.dropped[:size].any())
        for name in _SUMS:
            setattr(made, name, float(state["sums"][name]))
            if not math.isfinite(getattr(made, name)):
                raise InvalidValueError(f"{name} of a state must be finite, got {state['sums'][name]!r}")
        made.open = {int(id): int(arm) for id, arm in state["open"]}
        if not all(-1 <= arm < size for arm in made.open.values()):
            raise InvalidValueError("an open pull of a state has an arm that does not stand")
        if made.cells.low.shape[1] != axes or (made.weights[:size] < 0.0).any():
            raise InvalidValueError(f"the arms of a state must lie on {axes} axes and have weights of at least 0")
        if state["posterior"] is not None:
            made.posterior = Posterior.from_state(state["posterior"], capacity, axes, drifts=discount < 1.0)
            if made.posterior.size != size:
                raise InvalidValueError(f"the posterior of a state must be of its {size} arms, got {made.posterior.size}")
            made.variation[:size] = made.variations(made.posterior, slice(0, size))
        return made
