"""Interval and Box: search spaces. Pull: one trial. Bandit: the protocol of a search."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from sparsekit.errors import InvalidValueError

Side = Literal["below", "above"]
"""The side of a value that `tell` rules out."""


def check_number(value: float, what: str) -> float:
    """Return `value`, an int, a float, a numpy scalar or a tensor of one entry, as a Python float.

    Raises:
        InvalidValueError: `value` is text, a boolean, NaN or not a number; the message calls it `what`.
    """
    if not isinstance(value, (bool, np.bool_, str, bytes)):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isnan(number):
            return number
    raise InvalidValueError(f"{what} must be a number, got {value!r}")


@dataclass(frozen=True)
class Interval:
    """A search space of the numbers in [low, high], with the scale on which they are evenly spread.

    Args:
        low: The smallest value; above 0 if the scale is "log".
        high: The largest value, above `low`.
        scale: "linear", or "log" for values that matter by their order of magnitude, such as a learning rate.

    Raises:
        InvalidValueError: a bound is not finite, the bounds are not in order, or the scale does not suit them.
    """

    low: float
    high: float
    scale: Literal["linear", "log"] = "linear"

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", check_number(self.low, "low"))
        object.__setattr__(self, "high", check_number(self.high, "high"))
        if self.scale not in ("linear", "log"):
            raise InvalidValueError(f"scale must be 'linear' or 'log', got {self.scale!r}")
        if not math.isfinite(self.high - self.low):
            raise InvalidValueError(f"low, high and high - low must be finite, got low={self.low!r}, high={self.high!r}")
        if not self.low < self.high:
            raise InvalidValueError(f"low must be below high, got low={self.low!r}, high={self.high!r}")
        if self.scale == "log" and not self.low > 0.0:
            raise InvalidValueError(f"a log scale needs low > 0, got low={self.low!r}; raise it, or use scale='linear'")

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def check(self, value: float, what: str = "value") -> float:
        """Return `value` as a Python float, or raise InvalidValueError if it is outside the interval or NaN."""
        number = check_number(value, what)
        if number not in self:
            raise InvalidValueError(f"{what} must be in [{self.low!r}, {self.high!r}], got {value!r}")
        return number

    def to_unit(self, value: float) -> float:
        """Return the position of a value between `low` (0) and `high` (1) on this scale; exactly 0 and 1 at the ends.

        Raises:
            InvalidValueError: outside the interval, or NaN.
        """
        number = self.check(value)
        if self.scale == "linear":
            return (number - self.low) / (self.high - self.low)
        start, end = math.log(self.low), math.log(self.high)
        # Neighbouring floats can share a logarithm.
        return (math.log(number) - start) / (end - start) if end > start else float(number == self.high)

    def from_unit(self, share: float) -> float:
        """Return the value at `share`, in [0, 1], of the way from `low` to `high` on this scale: the inverse of `to_unit`.

        Raises:
            InvalidValueError: outside [0, 1], or NaN.
        """
        number = check_number(share, "share")
        if not 0.0 <= number <= 1.0:
            raise InvalidValueError(f"share must be in [0, 1], got {share!r}")
        if number in (0.0, 1.0):
            return self.high if number else self.low
        if self.scale == "linear":
            value = self.low + number * (self.high - self.low)
        else:
            start, end = math.log(self.low), math.log(self.high)
            value = math.exp(start + number * (end - start))
        return min(max(value, self.low), self.high)


@dataclass(frozen=True)
class Box:
    """A search space of several named numbers: a point has one value from each interval.

    Args:
        intervals: Name → interval, at least one, in the order of the coordinates. Copied.

    Raises:
        InvalidValueError: no interval, a name that is not text, or a value that is not an `Interval`.
    """

    intervals: Mapping[str, Interval]

    def __post_init__(self) -> None:
        if not isinstance(self.intervals, Mapping) or not self.intervals:
            raise InvalidValueError(
                f"intervals must map at least one name to an Interval, got {self.intervals!r};"
                " write Box({'lr': Interval(1e-4, 1.0, scale='log')})"
            )
        for name, interval in self.intervals.items():
            if not isinstance(name, str) or not name:
                raise InvalidValueError(f"the names of a Box must be text, got {name!r}")
            if not isinstance(interval, Interval):
                raise InvalidValueError(f"{name} must be an Interval, got {interval!r}; write Interval(low, high)")
        object.__setattr__(self, "intervals", dict(self.intervals))

    def __contains__(self, point: Mapping[str, float]) -> bool:
        return point.keys() == self.intervals.keys() and all(point[name] in own for name, own in self.intervals.items())

    def check(self, point: Mapping[str, float]) -> dict[str, float]:
        """Return `point` with Python floats, in the order of the intervals.

        Raises:
            InvalidValueError: a name is missing or unknown, or a value is outside its interval.
        """
        if not isinstance(point, Mapping) or point.keys() != self.intervals.keys():
            given = list(point) if isinstance(point, Mapping) else point
            raise InvalidValueError(f"a point of this Box names exactly {list(self.intervals)}, got {given!r}")
        return {name: interval.check(point[name], name) for name, interval in self.intervals.items()}

    def to_unit(self, point: Mapping[str, float]) -> tuple[float, ...]:
        """Return the position of `point` in the unit cube, each coordinate on the scale of its interval."""
        checked = self.check(point)
        return tuple(interval.to_unit(checked[name]) for name, interval in self.intervals.items())

    def from_unit(self, shares: Sequence[float]) -> dict[str, float]:
        """Return the point at these shares, in [0, 1], of the way along each interval: the inverse of `to_unit`."""
        if len(shares) != len(self.intervals):
            raise InvalidValueError(f"shares must hold {len(self.intervals)} numbers, one per interval, got {len(shares)}")
        pairs = zip(self.intervals.items(), shares, strict=True)
        return {name: interval.from_unit(share) for (name, interval), share in pairs}


@dataclass(frozen=True)
class Pull:
    """One trial of one value.

    Args:
        id: Counted from 0 by the bandit that proposed it.
        value: The value to try: a number of an `Interval`, or name → number of a `Box`. If another value was tried instead,
            tell `Pull(pull.id, tried)`.
    """

    id: int
    value: Any


@runtime_checkable
class Bandit(Protocol):
    """Searches an interval for the value with the largest mean reward, from noisy trials.

    Call `ask` for a value, try it, and `tell` its reward; `best` is the value to use in the end. A bandit is not
    thread-safe: guard it with a lock, as `BanditSampler` does.
    """

    def ask(self, *, upper: float | None = None) -> Pull:
        """Propose a value to try. Several pulls may be open at once; a pull without a reward costs nothing.

        Args:
            upper: Largest value that may be proposed; None for the end of the interval.

        Returns:
            An open pull.

        Raises:
            InvalidValueError: `upper` is below the interval, or NaN.
        """
        ...

    def tell(self, pull: Pull, reward: float, *, eliminate: Side | None = None) -> None:
        """Report the reward of a pull, in any order. Invalid rewards are rejected; the pull then stays open.

        Args:
            pull: From `ask`; or its id with another value, if that was tried instead.
            reward: Larger is better.
            eliminate: Rule out the values next to this one, "below" or "above" it. A bandit may ignore this.

        Raises:
            InvalidValueError: the pull is not open, the value is outside the interval, the reward is not finite, or
                `eliminate` has another value.
        """
        ...

    def forget(self, pull: Pull) -> None:
        """Close a pull whose trial failed. It counts as a trial with the worst reward known; if there is none, with the next.

        Leave a pull open if its value did not cause the failure, for example after a lost message.

        Args:
            pull: From `ask`; or its id with another value, if that was tried instead.

        Raises:
            InvalidValueError: the pull is not open, or the value is outside the interval.
        """
        ...

    def best(self) -> Pull:
        """Return the best pull so far.

        Raises:
            InvalidValueError: nothing has been told.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the whole search as plain JSON values, with the generator and the open pulls."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved search exactly: it then makes the same proposals.

        Args:
            state: From a bandit with the same settings.

        Raises:
            InvalidValueError: the settings differ, or the state is malformed; the bandit is unchanged.
        """
        ...
