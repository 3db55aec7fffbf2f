"""Arm: a part of an interval and its rewards; and how parts are found, and drawn from, on the scale of the interval."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparsekit.bandit.base import Interval

__all__ = ["Arm", "draw", "hold", "may_split"]


@dataclass(frozen=True)
class Arm:
    """One part of the interval, and what was learned of it.

    Args:
        low: The smallest value that belongs to it.
        high: Its end, which belongs to the next arm (to this one where the space ends).
        pulls: Rewards credited, those inherited from the arms it was split from included; h in the paper.
        mean: Of these rewards; 0 if there are none.
        variance: Of these rewards, divided by `pulls`; 0 if there are none.
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
