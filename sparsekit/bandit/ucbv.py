"""UCB-V on a fixed grid: the plain rival of every bandit that splits its interval."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np

from sparsekit.bandit.arms import Arm
from sparsekit.bandit.base import Drop, Interval, Pull, check_generator, check_number
from sparsekit.bandit.pulls import PullRecords, check_settings, generator_from_state, generator_state, reading_state
from sparsekit.errors import InvalidValueError

__all__ = ["UCBV"]


class UCBV:
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
        if not isinstance(space, Interval):
            raise InvalidValueError(f"space must be an Interval, got {space!r}; pass Interval(low, high)")
        if isinstance(arms, bool) or not isinstance(arms, (int, np.integer)) or arms < 2:
            raise InvalidValueError(f"arms must be an integer >= 2, got {arms!r}; the ends of the space are two of them")
        self.space = space
        self.exploration = check_number(exploration, "exploration")
        self.reward_range = check_number(reward_range, "reward_range")
        if not 0.0 <= self.exploration < math.inf:
            raise InvalidValueError(f"exploration must be finite and at least 0, got {exploration!r}; 0 is greedy")
        if not 0.0 < self.reward_range < math.inf:
            raise InvalidValueError(f"reward_range must be finite and above 0, got {reward_range!r}")
        last = int(arms) - 1
        self._points = [space.from_unit(i / last) for i in range(last + 1)]
        # Halfway between two points, on the scale of the space; a middle itself belongs to the lower point.
        self._middles = [space.from_unit((i + 0.5) / last) for i in range(last)]
        if any(a >= b for a, b in pairwise(self._points)):
            raise InvalidValueError(f"{space!r} holds too few numbers for {arms} points; take fewer, or a wider space")
        self._settings: dict[str, Any] = {
            "space": asdict(space),
            "arms": int(arms),
            "exploration": self.exploration,
            "reward_range": self.reward_range,
        }
        self._arms = [Arm(point, point) for point in self._points]
        self._rng = check_generator(rng)
        self._records = PullRecords(space)

    def __repr__(self) -> str:
        return self._records.summary(self, arms=len(self.arms))

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The points from low to high, each as an arm without width."""
        return tuple(self._arms)

    def indices(self) -> tuple[float, ...]:
        """The index U of each point, in the order of `arms`; infinity where there is no reward."""
        log = self.exploration * math.log(max(1, len(self._records.told)))
        return tuple(
            arm.mean + math.sqrt(2.0 * arm.variance * log / arm.pulls) + 3.0 * self.reward_range * log / arm.pulls
            if arm.pulls
            else math.inf
            for arm in self._arms
        )

    def ask(self, *, upper: float | None = None) -> Pull:
        """Propose the point of largest index; see `Bandit.ask`."""
        bound = self._records.check_upper(upper)
        count = bisect_right(self._points, bound)
        new = [position for position in range(count) if not self._arms[position].pulls]
        if new:
            opened = {self._nearest(value) for value in self._records.open_values()}
            fresh = [position for position in new if position not in opened] or new
            chosen = fresh[int(self._rng.integers(len(fresh)))]
        else:
            indices = self.indices()[:count]
            chosen = indices.index(max(indices))
        return self._records.propose(self._points[chosen])

    def _nearest(self, value: float) -> int:
        return bisect_left(self._middles, value)

    def tell(self, pull: Pull, reward: float, *, drop: Drop | None = None) -> None:
        """Credit a reward to the point nearest to the executed value; see `Bandit.tell`. `drop` is ignored."""
        value, gain = self._records.settle(pull, reward, drop)
        position = self._nearest(value)
        self._arms[position] = self._arms[position].rewarded(gain)

    def forget(self, pull: Pull) -> None:
        """Close a pull of which nothing will be told.

        Raises:
            InvalidValueError: the pull is not open.
        """
        self._records.forget(pull)

    def best(self) -> Pull:
        """The told pull nearest to the point of largest mean; of several the one of largest reward, then the first.

        Raises:
            InvalidValueError: nothing has been told.
        """
        if not self._records.told:
            raise InvalidValueError("no reward has been told yet, so no pull is best; tell() one first")

        def merit(entry: tuple[Pull, float]) -> tuple[float, float, int]:
            pull, reward = entry
            return self._arms[self._nearest(pull.value)].mean, reward, -pull.id

        return max(self._records.told, key=merit)[0]

    def state_dict(self) -> dict[str, Any]:
        """All that it takes to go on: settings, pulls and the generator, as plain JSON values."""
        return {
            "settings": {**self._settings, "space": dict(self._settings["space"])},
            "pulls": self._records.state_dict(),
            "generator": generator_state(self._rng),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, with the same bits; see `Bandit.load_state_dict`."""
        with reading_state("UCBV"):
            check_settings(self._settings, state)
            records = PullRecords.from_state(state["pulls"], self.space)
            rng = generator_from_state(state["generator"])
        arms = [Arm(point, point) for point in self._points]
        for pull, reward in records.told:
            position = self._nearest(pull.value)
            arms[position] = arms[position].rewarded(reward)
        self._arms, self._records, self._rng = arms, records, rng
