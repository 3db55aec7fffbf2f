"""Field: the cells of a partition with their arms, the rewards told, and what is believed of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from sparsekit.bandit.cells import Cells, Floats, Integers, grow
from sparsekit.bandit.noise import Noise, Watch
from sparsekit.bandit.posterior import Posterior

# Cells to begin with on an interval, and in a box of two axes or more; the largest number of cells.
_LINE, _CUBE, _CAPACITY = 5, 6, 2048
# Width of the middle part of a cell from which its arm is drawn, as a share of the cell.
_JITTER = 0.2
# p: what a unit of posterior variance at the arm is worth; φ: share of the variation that counts beside a better arm.
_CERTAINTY, _FACING = 1.0, 0.2
# All arms learn from one another after so many more rewards, as a share of those told since arms fell.
_REFRESH = 0.04
# Falls are looked for from so many repeated rewards on; after one, each arm keeps so much of a reward.
_SETTLED, _FADED = 8, 0.05
# There are probes from so many rewards on, counted from the first and from a fall.
_PROBE_FROM, _PROBE_FALLEN = 100.0, 10.0
# A variance of which floats keep no digits is no scale.
_LEAST_SCALE = 1e-250


class Field:
    """Cells, arms and posterior of a `SplitUCBV`, in the unit cube. Arm k lies in cell k."""

    def __init__(self, axes: int, *, discount: float | None, rng: np.random.Generator) -> None:
        """Cut the cube into a few equal cells, in random order, each with an arm near its middle.

        Args:
            axes: Number of axes of the cube.
            discount: Share of what is known that survives a reward, in (0, 1]; None: all of it until arms are seen to fall.
            rng: Draws the order and the arms.
        """
        self.discount = 1.0 if discount is None else discount
        self.watch = Watch() if discount is None else None
        self.cells = Cells(_LINE if axes == 1 else _CUBE, axes, rng)
        self.begin = size = self.cells.size
        self.capacity = max(_CAPACITY, 2 * size)
        self.points: Floats = np.array([self.middle(*box, rng) for box in zip(self.cells.low, self.cells.high)])
        self.weights: Floats = np.zeros(size)
        self.rewards: Floats = np.zeros(size)
        # How many rewards went to other points that were executed in place of the arm.
        self.tries: Floats = np.zeros(size)
        self.pulls: Integers = np.zeros(size, dtype=np.int64)
        # The first told pull of each arm, as its place among all told.
        self.first: Integers = np.full(size, -1)
        self.dropped: npt.NDArray[np.bool_] = np.zeros(size, dtype=np.bool_)
        self.posterior: Posterior | None = None
        self._reserve(max(64, 2 * size))
        self.drops = self.tried = False
        self.told = 0.0
        self.noises = Noise()
        # What of the index of each cell is owed to a better arm beside it, as of the last time that all arms learned.
        self.beside: Floats = np.zeros(0)
        # The index of each arm but for open pulls; None where it is to be computed.
        self._index: Floats | None = None
        # Rewards since all arms learned from one another, and whether they must before the next proposal.
        self.since = 0.0
        self.stale = True
        # Rewards since the first, or since arms fell; at how many a probe is thought of next, and from how many on they may
        # cost something; what those made since have cost.
        self.clock = 0.0
        self.probe = self.probe_from = _PROBE_FROM
        self.spent = 0.0
        # Open pulls: the arm of each, -1 if no cell could hold one.
        self.open: dict[int, int] = {}

    @property
    def full(self) -> bool:
        """Whether no cell may be split any more."""
        return self.cells.size >= self.capacity

    @property
    def ripe(self) -> bool:
        """Whether enough is known of the noise to split cells."""
        return self.noises.ripe(self.told)

    @property
    def noise(self) -> float:
        """Variance of a reward around the mean reward of its arm."""
        assert self.posterior is not None
        return self.noises.variance(self.posterior.scale)

    def middle(self, low: Floats, high: Floats, rng: np.random.Generator) -> Floats:
        """A point drawn from the middle part of a box."""
        point: Floats = low + (high - low) * (0.5 + _JITTER * (rng.random(len(low)) - 0.5))
        return point

    def _reserve(self, size: int) -> None:
        self.cells.reserve(size)
        grow(self, ("points", "weights", "rewards", "tries", "pulls", "first", "dropped"), size)
        if self.posterior is not None:
            self.posterior.reserve(size)

    # --- what is believed ---

    def refresh(self) -> None:
        """Let all arms learn from one another, where that is due; from the first rewards the scale is taken."""
        if self.posterior is None:
            if self.told < self.begin:
                return
            self.posterior = self._first_posterior()
        elif not self.stale and self.since < _REFRESH * min(self.told, self.clock):
            return
        size = self.cells.size
        self.posterior.sweep(self.cells, self.weights[:size], self.rewards[:size], self.noise, self.told)
        self.since, self.stale, self._index = 0.0, False, None
        # Along the first axis: numpy reduces a short last one slowly.
        better = np.maximum.reduce(self.posterior.means.take(self.cells.facing[:size].T))
        self.beside = better + np.sqrt(_FACING * self.posterior.room.take(self.cells.depth[:size]))

    def _first_posterior(self) -> Posterior:
        seen = np.flatnonzero(self.pulls[: self.cells.size])
        means = self.rewards[seen]
        level = float(means.mean())
        # Equal rewards have no scale; any will do.
        spread = float(means.var(ddof=1)) if len(seen) > 1 else 0.0
        scale = next((s for s in (spread, float(np.square(means).max())) if s > _LEAST_SCALE), 1.0)
        self.noises.distinct = len(seen) > 1 and len(set(means.tolist())) == len(seen)
        made = Posterior(scale, level, self.points.shape[1])
        made.reserve(len(self.weights))
        return made

    def indices(self, pending: Mapping[int, int]) -> Floats:
        """The index of each arm, float (arms,); -inf where dropped. Cells split since all arms last learned have no `beside`.

        Args:
            pending: Arms of open pulls, and how often each is open.
        """
        size, posterior = self.cells.size, self.posterior
        if posterior is None:
            # Nothing is known yet: the arms in turn.
            index: Floats = -(self.pulls[:size] + self.tries[:size])
            for arm, times in pending.items():
                index[arm] -= times
        else:
            if self._index is None or len(self._index) != size or self.tried:
                self._index = self._indices(posterior)
            index = self._index.copy()
            for arm, times in pending.items():
                index[arm] = self._index_of(posterior, arm, times)
        if self.drops:
            index[self.dropped[:size]] = -math.inf
        return index

    def _indices(self, posterior: Posterior) -> Floats:
        """The index of each arm if no pull were open, dropped ones included."""
        size = self.cells.size
        variances = posterior.variances[:size]
        if self.tried:
            variances = variances / (1.0 + variances * self.tries[:size] / self.noise)
        index: Floats = np.sqrt(_CERTAINTY * variances + posterior.room.take(self.cells.depth[:size]))
        index += posterior.means[:size]
        known = index[: len(self.beside)]
        np.maximum(known, self.beside, out=known)
        return index

    def _index_of(self, posterior: Posterior, arm: int, times: int) -> float:
        """The index of one arm when so many open pulls of it have been told."""
        worth = self.worth(posterior, arm, times)
        return max(worth, self.beside.item(arm)) if arm < len(self.beside) else worth

    def worth(self, posterior: Posterior, arm: int, times: int) -> float:
        """The same without what is owed to a better arm beside it."""
        room = posterior.room.item(self.cells.depth.item(arm))
        return posterior.means.item(arm) + math.sqrt(_CERTAINTY * self.variance(arm, times) + room)

    def variance(self, arm: int, times: int) -> float:
        """Posterior variance of an arm when so many open pulls of it have been told; those executed elsewhere count as told."""
        assert self.posterior is not None
        variance, rewards = self.posterior.variances.item(arm), times + self.tries.item(arm)
        return variance / (1.0 + variance * rewards / self.noise) if rewards else variance

    # --- splitting ---

    def split(self, cell: int, axis: int, cut: float, point: Floats, *, keeps_low: bool | None = None) -> int:
        """Cut a cell in two; the new cell gets an arm at a point, the other one keeps its own.

        Args:
            cell: Must not be the last one for which there is room: see `full`.
            axis: Which coordinate is cut.
            cut: Where, strictly within the cell.
            point: In the other part than the cell's own arm.
            keeps_low: Which part the cell's own arm is in; None where that is plain, since it does not lie on the cut.

        Returns:
            The new arm.
        """
        if self.cells.size == len(self.weights):
            self._reserve(2 * len(self.weights))
        if keeps_low is None:
            keeps_low = bool(self.points[cell, axis] < cut)
        new = self.cells.split(cell, axis, cut, keeps_low=keeps_low)
        self.points[new] = point
        self.first[new] = -1
        self.dropped[new] = self.dropped[cell]
        self.stale = True
        if self.posterior is not None:
            self.posterior.settle(cell, new, int(self.cells.born[new]))
        return new

    # --- learning ---

    def learn(self, arm: int, reward: float, weight: float, place: int) -> None:
        """Take in one reward.

        Args:
            arm: Where it was got.
            reward: Any finite number.
            weight: Number of rewards that it counts for.
            place: Place of the pull among all told.
        """
        discount = self.discount
        if discount < 1.0:
            self.weights[: self.cells.size] *= discount
            self.tries[: self.cells.size] *= discount
            self.told *= discount
            self.noises.fade(discount)
        had, mean, fallen = self.weights.item(arm), self.rewards.item(arm), False
        if self.pulls.item(arm):
            self.noises.repeats += 1.0
            if had > 0.0:
                fallen = self._fallen(reward - mean, 1.0 / had + 1.0 / weight)
                self.noises.saw(reward - mean, had, weight, faded=discount < 1.0)
        else:
            self.stale = True
        self.weights[arm] = had + weight
        self.rewards[arm] = mean + (reward - mean) * (weight / (had + weight))
        self.told += 1.0
        self.since += 1.0
        self.clock += 1.0
        self.pulls[arm] += 1
        if self.first.item(arm) < 0:
            self.first[arm] = place
        if self.posterior is not None:
            self.posterior.observe(arm, reward - self.posterior.level, self.noise / weight)
        if fallen:
            weights = self.weights[: self.cells.size]
            np.minimum(weights, _FADED, out=weights)
            self.stale = True
            self.clock = self.spent = 0.0
            self.probe = self.probe_from = _PROBE_FALLEN
        if self.stale:
            self._index = None
        elif self._index is not None and self.posterior is not None:
            # Only this arm has learned anything yet.
            self._index[arm] = self._index_of(self.posterior, arm, 0)

    def _fallen(self, surprise: float, share: float) -> bool:
        """Whether arms have fallen, as one more repeated reward shows, whose surprise has that share of the noise."""
        if self.watch is None or self.posterior is None or self.noises.repeats < _SETTLED:
            return False
        return self.watch.sees(surprise, self.noise * share)

    def miss(self, arm: int, weight: float) -> None:
        """Another point was executed in place of an arm: nothing is known of it, yet it is proposed as if it had been told.

        Or else a proposal that is always executed elsewhere, say rounded, would be made for ever.
        """
        self.tries[arm] += weight
        self.noises.repeats += 1.0
        self.tried = True

    def best(self) -> int:
        """The place, among all told, of the first pull of the arm that is best with some confidence."""
        size = self.cells.size
        if self.posterior is None:
            merit = self.rewards[:size].copy()
        else:
            merit = self.posterior.means[:size] - np.sqrt(self.posterior.variances[:size])
        told = self.first[:size] >= 0
        merit[~told] = -math.inf
        standing = told & ~self.dropped[:size]
        if standing.any():
            merit[~standing] = -math.inf
        return int(self.first[int(merit.argmax())])

    def rows(self) -> list[tuple[float, float, int, float, float, float]]:
        """Of each cell that stands: low and high on the first axis, pulls, posterior mean and variance, index; from low up."""
        size, posterior = self.cells.size, self.posterior
        means = self.rewards[:size] if posterior is None else posterior.level + posterior.means[:size]
        variances = np.zeros(size) if posterior is None else posterior.variances[:size]
        index = np.full(size, math.inf) if posterior is None else posterior.level + self.indices({})
        columns = (self.cells.low[:size, 0], self.cells.high[:size, 0], self.pulls[:size], means, variances, index)
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        return sorted(row for row, dropped in zip(rows, self.dropped[:size].tolist(), strict=True) if not dropped)
