"""E-UCB: discounted upper confidence bounds over a partition that is refined where it is pulled, as in FedMP."""

import math
from itertools import pairwise

import numpy as np

from sparsekit.bandit.base import Interval, Side, check_number
from sparsekit.bandit.logged import Arm, ArmBandit, hold, may_split
from sparsekit.errors import InvalidValueError


class EUCB(ArmBandit):
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
    - nothing is eliminated: `eliminate` is taken and ignored;
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
            arms: Number of arms to begin with.
            exploration: c, at least 0; 0 is greedy once every arm has a reward.
            discount: λ in (0, 1]; a reward counts half after log(1/2) / log(λ) more; 1 forgets nothing.
            min_width: The narrowest part that a split may leave, as a share of the space on its scale, in
                [0, 1/arms].
            rng: Draws the first arm and the values.

        Raises:
            InvalidValueError: one of these is not allowed, or the space holds too few numbers for so many arms.
        """
        super().__init__(space, arms=arms, exploration=exploration, rng=rng, min_width=min_width)
        self.discount = check_number(discount, "discount")
        if not 0.0 < self.discount <= 1.0:
            raise InvalidValueError(f"discount must be in (0, 1], got {discount!r}; 1 forgets nothing")
        self._settings |= {"discount": self.discount}
        self._edges = self._even(arms + 1)

    def _sums(self) -> tuple[np.ndarray, np.ndarray]:
        """N and Σ λ^(t−s) G_s of each arm, float (arms,)."""
        told, count = self._told, len(self._edges) - 1
        values = np.fromiter((pull.value for pull, _ in told), float, len(told))
        rewards = np.fromiter((reward for _, reward in told), float, len(told))
        weights = self.discount ** np.arange(len(told) - 1, -1, -1, dtype=float)
        at = self._positions(values)
        return np.bincount(at, weights, count), np.bincount(at, weights * rewards, count)

    def _positions(self, values: np.ndarray) -> np.ndarray:
        """The arm that holds each value; the end of the space belongs to the last."""
        return np.minimum(np.searchsorted(self._edges, values, side="right") - 1, len(self._edges) - 2)

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The arms from low to high, with the plain number, mean and variance of the rewards pulled within each."""
        arms = [Arm(low, high) for low, high in pairwise(self._edges)]
        for pull, reward in self._told:
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

    def _choose(self, bound: float | None) -> float:
        return self._draw_best(list(pairwise(self._edges)), bound)

    def _learn(self, value: float, reward: float, eliminate: Side | None) -> None:
        del reward, eliminate  # sums are made anew from all that was told
        position = int(self._positions(np.array([value]))[0])
        low, high = self._edges[position], self._edges[position + 1]
        if may_split(self.space, low, value, high, min_width=self.min_width):
            self._edges.insert(position + 1, value)

    def _place_of_best(self) -> int:
        """Of the arm of largest discounted mean the pull of largest reward, then the newest."""
        counts, sums = self._sums()
        means = np.divide(sums, counts, out=np.full_like(sums, -math.inf), where=counts > 0.0)
        worth = means[self._positions(np.array([pull.value for pull, _ in self._told]))].tolist()
        return max(range(len(self._told)), key=lambda place: (worth[place], self._told[place][1], self._told[place][0].id))
