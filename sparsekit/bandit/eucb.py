"""E-UCB: discounted upper confidence bounds over a partition that is refined where it is pulled, as in FedMP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np

from sparsekit.bandit.arms import Arm, draw, hold, may_split
from sparsekit.bandit.base import Drop, Interval, Pull, check_generator, check_number
from sparsekit.bandit.pulls import PullRecords, check_settings, generator_from_state, generator_state, reading_state
from sparsekit.errors import InvalidValueError

__all__ = ["EUCB"]


class EUCB:
    """Extended Upper Confidence Bound: a `Bandit` over an interval for rewards that drift.

    With t rewards G_1 … G_t told so far, at values x_1 … x_t, an arm P has the discounted count, mean and index

        N(P) = Σ_s λ^(t−s) 1[x_s ∈ P],   Ḡ(P) = Σ_s λ^(t−s) G_s 1[x_s ∈ P] / N(P),
        U(P) = Ḡ(P) + c sqrt(2 log(Σ_Q N(Q)) / N(P)),

    and the arm of largest index is pulled at a value drawn uniformly from it. The value splits its arm. A part keeps the
    rewards that were pulled within it, so one part is empty after a split; it has an infinite index and is pulled next.

    Decided here, where the paper leaves it open or we know it only in outline:
    - the bonus assumes rewards in [0, 1]; with others, scale `exploration` by their range;
    - until the first reward the arm is drawn at random; later ties go to the lowest arm, so empty arms are tried from
      the low end on;
    - an arm is not split where a part would be narrower than `min_width`, so there are at most 1 / min_width arms;
    - nothing is eliminated: `drop` is taken and ignored;
    - with `upper`, only arms that begin below it compete, and the draw stops there; if none does, `upper` is proposed.

    Source: Jiang et al., "FedMP: Federated Learning through Adaptive Model Pruning in Heterogeneous Edge Computing",
    ICDE 2022; the discount is that of Garivier, Moulines, "On Upper-Confidence Bound Policies for Switching Bandit
    Problems", ALT 2011. The values of λ, c and the granularity are ours.
    """

    def __init__(
        self,
        space: Interval,
        *,
        arms: int = 1,
        exploration: float = 1.0,
        discount: float = 0.98,
        min_width: float = 0.05,
        rng: np.random.Generator,
    ) -> None:
        """Cut the space into equal arms.

        Args:
            space: Where to search.
            arms: How many to begin with.
            exploration: c, at least 0; 0 is greedy once every arm has a reward.
            discount: λ in (0, 1]; a reward counts half after log(1/2) / log(λ) more; 1 forgets nothing.
            min_width: The narrowest part that a split may leave, as a share of the space on its scale, in
                [0, 1/arms].
            rng: Draws the first arm and the values.

        Raises:
            InvalidValueError: one of these is not allowed, or the space holds too few numbers for so many arms.
        """
        if not isinstance(space, Interval):
            raise InvalidValueError(f"space must be an Interval, got {space!r}; pass Interval(low, high)")
        if isinstance(arms, bool) or not isinstance(arms, (int, np.integer)) or arms < 1:
            raise InvalidValueError(f"arms must be an integer >= 1, got {arms!r}")
        self.space = space
        self.exploration = check_number(exploration, "exploration")
        self.discount = check_number(discount, "discount")
        self.min_width = check_number(min_width, "min_width")
        if not 0.0 <= self.exploration < math.inf:
            raise InvalidValueError(f"exploration must be finite and at least 0, got {exploration!r}; 0 is greedy")
        if not 0.0 < self.discount <= 1.0:
            raise InvalidValueError(f"discount must be in (0, 1], got {discount!r}; 1 forgets nothing")
        if not 0.0 <= self.min_width <= 1.0 / arms:
            raise InvalidValueError(f"min_width must be in [0, 1/arms] = [0, {1 / arms:g}], got {min_width!r}")
        edges = [space.from_unit(i / arms) for i in range(int(arms) + 1)]
        if any(a >= b for a, b in pairwise(edges)):
            raise InvalidValueError(f"{space!r} holds too few numbers for {arms} arms; take fewer arms or a wider space")
        self._settings: dict[str, Any] = {
            "space": asdict(space),
            "arms": int(arms),
            "exploration": self.exploration,
            "discount": self.discount,
            "min_width": self.min_width,
        }
        self._edges = edges
        self._rng = check_generator(rng)
        self._records = PullRecords(space)

    def _sums(self) -> tuple[np.ndarray, np.ndarray]:
        """N and Σ λ^(t−s) G_s of each arm, float (arms,)."""
        told, count = self._records.told, len(self._edges) - 1
        values = np.fromiter((pull.value for pull, _ in told), float, len(told))
        rewards = np.fromiter((reward for _, reward in told), float, len(told))
        weights = self.discount ** np.arange(len(told) - 1, -1, -1, dtype=float)
        # The end of the space belongs to the last arm.
        at = np.minimum(np.searchsorted(self._edges, values, side="right") - 1, count - 1)
        return np.bincount(at, weights, count), np.bincount(at, weights * rewards, count)

    def __repr__(self) -> str:
        return self._records.summary(self, arms=len(self.arms))

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The arms from low to high, with the plain number, mean and variance of the rewards pulled within each."""
        arms = [Arm(low, high) for low, high in pairwise(self._edges)]
        for pull, reward in self._records.told:
            position, _ = hold(arms, pull.value, self.space)
            arms[position] = arms[position].rewarded(reward)
        return tuple(arms)

    def indices(self) -> tuple[float, ...]:
        """The index U of each arm, in the order of `arms`; infinity where nothing was pulled."""
        counts, sums = self._sums()
        # Rewards that were forgotten leave a count that underflows to 0 in a very long run: then the arm counts as new.
        total = math.log(max(1.0, float(counts.sum())))
        return tuple(
            float(gain / count) + self.exploration * math.sqrt(2.0 * total / float(count)) if count > 0.0 else math.inf
            for count, gain in zip(counts, sums)
        )

    def ask(self, *, upper: float | None = None) -> Pull:
        """Propose a value from the arm of largest index; see `Bandit.ask`."""
        bound = self._records.check_upper(upper)
        count = sum(low < bound for low in self._edges[:-1])
        if count == 0:
            return self._records.propose(bound)
        if self._records.told:
            indices = self.indices()[:count]
            chosen = indices.index(max(indices))
        else:
            chosen = int(self._rng.integers(count))
        low, high = self._edges[chosen], self._edges[chosen + 1]
        return self._records.propose(draw(self.space, low, high, bound, rng=self._rng))

    def tell(self, pull: Pull, reward: float, *, drop: Drop | None = None) -> None:
        """Note a reward, and split the arm that holds the executed value; see `Bandit.tell`. `drop` is ignored."""
        value, _ = self._records.settle(pull, reward, drop)
        position = min(int(np.searchsorted(self._edges, value, side="right")) - 1, len(self._edges) - 2)
        low, high = self._edges[position], self._edges[position + 1]
        if may_split(self.space, low, value, high, min_width=self.min_width):
            self._edges.insert(position + 1, value)

    def forget(self, pull: Pull) -> None:
        """Close a pull of which nothing will be told.

        Raises:
            InvalidValueError: the pull is not open.
        """
        self._records.forget(pull)

    def best(self) -> Pull:
        """The told pull in the arm of largest discounted mean; within it the one of largest reward, then the newest.

        Raises:
            InvalidValueError: nothing has been told.
        """
        if not self._records.told:
            raise InvalidValueError("no reward has been told yet, so no pull is best; tell() one first")
        counts, sums = self._sums()
        means = np.divide(sums, counts, out=np.full_like(sums, -math.inf), where=counts > 0.0)
        last = len(self._edges) - 2

        def merit(entry: tuple[Pull, float]) -> tuple[float, float, int]:
            pull, reward = entry
            position = min(int(np.searchsorted(self._edges, pull.value, side="right")) - 1, last)
            return float(means[position]), reward, pull.id

        return max(self._records.told, key=merit)[0]

    def state_dict(self) -> dict[str, Any]:
        """All that it takes to go on: settings, edges, pulls and the generator, as plain JSON values."""
        return {
            "settings": {**self._settings, "space": dict(self._settings["space"])},
            "edges": list(self._edges),
            "pulls": self._records.state_dict(),
            "generator": generator_state(self._rng),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, with the same bits; see `Bandit.load_state_dict`."""
        with reading_state("EUCB"):
            check_settings(self._settings, state)
            edges = [float(edge) for edge in state["edges"]]
            whole = len(edges) > 1 and [edges[0], edges[-1]] == [self.space.low, self.space.high]
            if not whole or any(a >= b for a, b in pairwise(edges)):
                raise InvalidValueError(f"the edges of a state must rise from end to end of the space, got {edges!r}")
            records = PullRecords.from_state(state["pulls"], self.space)
            rng = generator_from_state(state["generator"])
        self._edges, self._records, self._rng = edges, records, rng
