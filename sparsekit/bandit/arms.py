"""Arm: a part of an interval and its rewards; ArmBandit: what bandits share that cut an interval into arms."""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from sparsekit.bandit.base import Drop, Interval, Pull, check_number
from sparsekit.bandit.logged import LoggedBandit
from sparsekit.errors import InvalidValueError


@dataclass(frozen=True)
class Arm:
    """One part of the interval, and what was learned of it.

    Args:
        low: The smallest value that belongs to it.
        high: Its end, which belongs to the next arm (to this one where the space ends).
        pulls: Rewards credited, those inherited from the arms it was split from included; h in the paper.
        mean: Mean of these rewards; 0 if there are none.
        variance: Variance of these rewards, divided by `pulls`; 0 if there are none.
    """

    low: float
    high: float
    pulls: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def rewarded(self, reward: float) -> Arm:
        """This arm after one more reward (Welford's update: no sum of squares that could cancel)."""
        pulls = self.pulls + 1
        step = reward - self.mean
        mean = self.mean + step / pulls
        variance = (self.variance * self.pulls + step * (reward - mean)) / pulls
        return replace(self, pulls=pulls, mean=mean, variance=variance)


def hold(arms: Sequence[Arm], value: float, space: Interval) -> tuple[int, bool]:
    """The position of the arm that holds `value`, True; or of the nearest (ties: the lower), False.

    Args:
        arms: Disjoint and ordered, at least one.
        value: In the space.
        space: On its scale "nearest" is measured; its end belongs to an arm that ends there.
    """
    at = bisect_right(arms, value, key=lambda arm: arm.low) - 1
    if at >= 0:
        high = arms[at].high
        if value < high or value == high == space.high:
            return at, True
    if at < 0 or at + 1 == len(arms):
        return max(at, 0), False
    here = space.to_unit(value)
    down = here - space.to_unit(arms[at].high)
    up = space.to_unit(arms[at + 1].low) - here
    return (at if down <= up else at + 1), False


def may_split(space: Interval, low: float, value: float, high: float, *, min_width: float) -> bool:
    """Whether `value` cuts [low, high) in two parts of at least `min_width`, a share of the space on its scale."""
    if not low < value < high:
        return False
    left, here, right = (space.to_unit(edge) for edge in (low, value, high))
    return min(here - left, right - here) >= min_width


def draw(space: Interval, low: float, high: float, bound: float, *, rng: np.random.Generator) -> float:
    """A value drawn uniformly, on the scale of the space, from [low, high) and from what is at most `bound`."""
    start, end = space.to_unit(low), space.to_unit(min(high, bound))
    value = space.from_unit(min(start + (end - start) * rng.random(), 1.0))
    # The way through the unit interval may round across an edge.
    last = bound if bound < high else math.nextafter(high, low)
    return min(max(value, low), last)


class ArmBandit(LoggedBandit[Pull]):
    """A bandit that cuts an interval into arms and learns one by one what was told of a value.

    Args:
        space: Where to search.
        arms: Number of arms to begin with, at least 1.
        exploration: At least 0.
        rng: Draws the first arm and the values.
        min_width: The narrowest part that a split may leave, as a share of the space; None for a bandit that splits none.

    Raises:
        InvalidValueError: one of these is not allowed.
    """

    space: Interval

    def __init__(
        self, space: Interval, *, arms: int, exploration: float, rng: np.random.Generator, min_width: float | None = None
    ) -> None:
        if not isinstance(space, Interval):
            raise InvalidValueError(f"space must be an Interval, got {space!r}; pass Interval(low, high)")
        if isinstance(arms, bool) or not isinstance(arms, (int, np.integer)) or arms < 1:
            raise InvalidValueError(f"arms must be an integer >= 1, got {arms!r}")
        self.exploration = check_number(exploration, "exploration")
        if not 0.0 <= self.exploration < math.inf:
            raise InvalidValueError(f"exploration must be finite and at least 0, got {exploration!r}; 0 is greedy")
        super().__init__(space, {"arms": int(arms), "exploration": self.exploration}, rng)
        if min_width is not None:
            self.min_width = check_number(min_width, "min_width")
            if not 0.0 <= self.min_width <= 1.0 / arms:
                raise InvalidValueError(f"min_width must be in [0, 1/arms] = [0, {1 / arms:g}], got {min_width!r}")
            self._settings["min_width"] = self.min_width

    @property
    @abstractmethod
    def arms(self) -> tuple[Arm, ...]:
        """The arms from low to high."""

    @abstractmethod
    def indices(self) -> tuple[float, ...]:
        """The index U of each arm, in the order of `arms`."""

    @abstractmethod
    def _learn(self, value: float, reward: float, drop: Drop | None) -> None:
        """Take in a reward."""

    def tell(self, pull: Pull, reward: float, *, drop: Drop | None = None) -> None:
        """Credit a reward to the arm of the executed value; see `Bandit.tell`."""
        value, number, _ = self._take(pull, reward, drop)
        self._learn(value, number, drop)

    def _even(self, count: int) -> list[float]:
        """So many values from end to end of the space, even on its scale.

        Raises:
            InvalidValueError: the space does not hold so many numbers.
        """
        values = [self.space.from_unit(i / (count - 1)) for i in range(count)]
        if any(a >= b for a, b in pairwise(values)):
            raise InvalidValueError(f"{self.space!r} holds too few numbers for so many arms; take fewer, or a wider space")
        return values

    def _draw_best(self, edges: Sequence[tuple[float, float]], bound: float | None) -> float:
        """A value drawn from the arm of largest index, given the ends of each; at first, from any arm.

        Only arms that begin below the bound compete, and if there is none, the bound itself is taken. Not those that begin at
        it: such an arm would be pulled at one point for ever, since it cannot be split there.
        """
        limit = self.space.high if bound is None else bound
        count = sum(low < limit for low, _ in edges)
        if count == 0:
            return limit
        if self._told:
            indices = self.indices()[:count]
            chosen = indices.index(max(indices))
        else:
            chosen = int(self._rng.integers(count))
        return draw(self.space, *edges[chosen], limit, rng=self._rng)
