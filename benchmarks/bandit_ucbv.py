"""UCB-V on a fixed grid: the plain rival of every bandit that splits its interval."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

import numpy as np

from sparsekit.bandit.arms import Arm, ArmBandit
from sparsekit.bandit.base import Drop, Interval, check_number
from sparsekit.errors import InvalidValueError

__all__ = ["UCBV"]


class UCBV(ArmBandit):
    """Upper Confidence Bound with Variance estimates: a `Bandit` that only ever proposes the points of a grid.

    After t rewards, a point with h of them, of mean ḡ and variance v̄, has the index

        U = ḡ + sqrt(2 v̄ ζ log t / h) + 3 b ζ log t / h,

    infinite where h = 0. The grid is even on the scale of the space and has both of its ends.

    Decided here:
    - points without a reward are tried in random order, those first that are not already open;
    - ties go to the lowest point;
    - another value than a grid point is credited to the nearest on the scale of the space (ties: the lower);
    - nothing is eliminated: `drop` is taken and ignored;
    - with `upper`, only points up to it compete; the lowest point always does.

    Source: Audibert, Munos, Szepesvári, "Exploration–exploitation tradeoff using variance estimates in multi-armed
    bandits", Theoretical Computer Science 410, 2009; with c = 1 and ζ > 1 its regret is logarithmic.
    """

    def __init__(
        self,
        space: Interval,
        *,
        arms: int = 5,
        exploration: float = 1.2,
        reward_range: float = 1.0,
        rng: np.random.Generator,
    ) -> None:
        """Lay the grid.

        Args:
            space: Where to search.
            arms: How many points, at least 2.
            exploration: ζ, at least 0; the theory wants more than 1, and less explores less.
            reward_range: b, the largest reward minus the least, above 0.
            rng: Draws the order in which the points are first tried.

        Raises:
            InvalidValueError: one of these is not allowed, or the space holds too few numbers for so many points.
        """
        super().__init__(space, arms=arms, exploration=exploration, rng=rng)
        self.reward_range = check_number(reward_range, "reward_range")
        if not 0.0 < self.reward_range < math.inf:
            raise InvalidValueError(f"reward_range must be finite and above 0, got {reward_range!r}")
        self._settings |= {"reward_range": self.reward_range}
        self._points = self._even(arms)
        last = arms - 1
        # Halfway between two points, on the scale of the space; a middle itself belongs to the lower point.
        self._middles = [space.from_unit((i + 0.5) / last) for i in range(last)]
        self._arms = [Arm(point, point) for point in self._points]

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The points from low to high, each as an arm without width."""
        return tuple(self._arms)

    def indices(self) -> tuple[float, ...]:
        """The index U of each point, in the order of `arms`; infinity where there is no reward."""
        log = self.exploration * math.log(max(1, len(self._told)))
        return tuple(
            arm.mean + math.sqrt(2.0 * arm.variance * log / arm.pulls) + 3.0 * self.reward_range * log / arm.pulls
            if arm.pulls
            else math.inf
            for arm in self._arms
        )

    def _choose(self, bound: float | None) -> float:
        count = len(self._points) if bound is None else bisect_right(self._points, bound)
        new = [position for position in range(count) if not self._arms[position].pulls]
        if new:
            opened = {self._nearest(value) for value in self._open.values()}
            fresh = [position for position in new if position not in opened] or new
            chosen = fresh[int(self._rng.integers(len(fresh)))]
        else:
            indices = self.indices()[:count]
            chosen = indices.index(max(indices))
        return self._points[chosen]

    def _nearest(self, value: float) -> int:
        return bisect_left(self._middles, value)

    def _learn(self, value: float, reward: float, drop: Drop | None) -> None:
        del drop
        position = self._nearest(value)
        self._arms[position] = self._arms[position].rewarded(reward)

    def _place_of_best(self) -> int:
        """Of the point of largest mean the pull of largest reward, then the first."""

        def merit(place: int) -> tuple[float, float, int]:
            pull, reward = self._told[place]
            return self._arms[self._nearest(pull.value)].mean, reward, -pull.id

        return max(range(len(self._told)), key=merit)
