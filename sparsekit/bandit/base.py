"""Bandit, Interval and Pull: what every bandit over an interval speaks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from sparsekit.errors import InvalidValueError

Drop = Literal["below", "above"]
"""The side of a value that `tell` rules out."""


def check_number(value: float, what: str) -> float:
    """Return `value` as a Python float, or raise.

    Args:
        value: Anything that is a number: int, float, a numpy scalar, a tensor of one entry.
        what: Names the value in the message.

    Raises:
        InvalidValueError: not a number (text and booleans are not), or NaN.
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
    """The numbers in [low, high], and the scale on which they are evenly spread.

    Args:
        low: The smallest value; above 0 if the scale is "log".
        high: The largest value, above `low`.
        scale: "linear", or "log" for what is told by its order of magnitude, such as a learning rate.

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
        """Return `value` as a Python float, or raise; `what` names it in the message.

        Raises:
            InvalidValueError: outside the interval, or NaN.
        """
        number = check_number(value, what)
        if number not in self:
            raise InvalidValueError(f"{what} must be in [{self.low!r}, {self.high!r}], got {value!r}")
        return number

    def to_unit(self, value: float) -> float:
        """Where `value` lies between `low` (0) and `high` (1) on this scale.

        Args:
            value: In [low, high].

        Returns:
            In [0, 1]; exactly 0 and 1 at the ends.

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
        """The value at `share` of the way from `low` to `high` on this scale: the inverse of `to_unit`.

        Args:
            share: In [0, 1].

        Returns:
            In [low, high]; exactly the bounds at 0 and 1.

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
class Pull:
    """One trial of one value.

    Args:
        id: Counted from 0 by the bandit that proposed it.
        value: What to try. If another value was tried instead, tell `Pull(pull.id, tried)`.
    """

    id: int
    value: float


@runtime_checkable
class Bandit(Protocol):
    """Finds the value of largest mean reward in an interval, one noisy trial at a time."""

    def ask(self, *, upper: float | None = None) -> Pull:
        """Propose a value. Several pulls may be open at once; one that is never told costs nothing.

        Args:
            upper: The proposal must not exceed it; `None` or more than the interval's end: no bound.

        Returns:
            An open pull.

        Raises:
            InvalidValueError: `upper` is below the interval, or NaN.
        """
        ...

    def tell(self, pull: Pull, reward: float, *, drop: Drop | None = None) -> None:
        """Report what came of a pull, in any order. Whatever is refused leaves the bandit as it was, the pull open.

        Args:
            pull: What `ask` gave, or the same id with the value that was tried in its place.
            reward: Larger is better.
            drop: Rule out the values near the pull's on this side of it. A bandit that cannot may ignore it.

        Raises:
            InvalidValueError: the pull is not open, the value lies outside the interval, the reward is not finite, or
                `drop` is no such word.
        """
        ...

    def forget(self, pull: Pull) -> None:
        """Close a pull of which nothing will be told, such as a failed trial; it leaves no trace but its id.

        Raises:
            InvalidValueError: the pull is not open.
        """
        ...

    def best(self) -> Pull:
        """The told pull to be recommended so far.

        Raises:
            InvalidValueError: nothing has been told.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that it takes to go on: plain JSON values, the generator and the open pulls included."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, with the same bits.

        Args:
            state: From a bandit with the same settings.

        Raises:
            InvalidValueError: the settings differ, or the state is malformed; nothing has changed then.
        """
        ...
