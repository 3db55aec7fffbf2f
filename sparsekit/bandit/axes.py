"""Axis: a number or a choice that is searched over, as `--space` says it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from sparsekit.bandit.base import Interval
from sparsekit.errors import InvalidValueError

_FORM = (
    "NAME=LOW:HIGH, with :log or :int or both behind it, or NAME=A,B,C, as in lr=1e-4:1e-1:log, workers=1:64:log:int"
    " or batch_size=10,20,50"
)
_SIGNIFICANT = 6


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A range of numbers, or several values as text.

    Args:
        name: What is searched over.
        low: The smallest number.
        high: The largest number, above `low`.
        log: Whether the order of magnitude matters.
        integer: Whole numbers only.
        choices: The values, where it is no range; empty for a range.

    Raises:
        InvalidValueError: the bounds make no range, or those of whole numbers are not whole.
    """

    name: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    integer: bool = False
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.integer and not (float(self.low).is_integer() and float(self.high).is_integer()):
            raise InvalidValueError(f"{self.name} takes whole numbers, so its bounds must be whole, got {self.low}:{self.high}")
        if self.integer and self.log and self.low < 1:
            raise InvalidValueError(f"whole numbers on a log scale begin at 1 or above, got {self.name}={self.low:g}")
        Interval(self.low, self.high, "log" if self.log else "linear")

    @staticmethod
    def parse(text: str) -> Axis:
        """Read what stands behind `--space`.

        Raises:
            InvalidValueError: not of the form, or the bounds make no range.
        """
        name, equals, rest = (part.strip() for part in text.partition("="))
        if not (equals and re.fullmatch(r"[A-Za-z_][\w.]*", name)):
            raise InvalidValueError(f"--space must be {_FORM}, got {text!r}")
        low, high, *words = (*(part.strip() for part in rest.split(":")), "", "")
        words = [word for word in words if word]
        try:
            ends = (float(low), float(high))
        except ValueError:
            # Objects of one's own have a colon too: package.module:Class.
            choices = tuple(part.strip() for part in rest.split(",") if part.strip())
            if len(choices) < 2 or len(set(choices)) < len(choices):
                raise InvalidValueError(f"--space must be {_FORM}, with at least two different values, got {text!r}") from None
            return Axis(name=name, choices=choices)
        if not set(words) <= {"log", "int"} or len(set(words)) < len(words):
            raise InvalidValueError(f"--space must be {_FORM}, got {text!r}")
        try:
            return Axis(name=name, low=ends[0], high=ends[1], log="log" in words, integer="int" in words)
        except InvalidValueError as error:
            raise InvalidValueError(f"--space {text}: {error}") from error

    def ends(self) -> tuple[str, ...]:
        """Texts to try before the first trial: both ends of a range, or every choice."""
        return self.choices or (self.text(self.low), self.text(self.high))

    def rounded(self, value: float) -> float:
        """A number with as many digits as tell a millionth of the range apart (of a log scale, of the value), within it."""
        if self.integer:
            return float(min(max(math.floor(value + 0.5), self.low), self.high))
        spread = 1.0 if self.log else max(abs(self.low), abs(self.high)) / (self.high - self.low)
        digits = min(17, _SIGNIFICANT + max(0, math.ceil(math.log10(spread))))
        return min(max(float(f"{value:.{digits}g}"), self.low), self.high)

    def text(self, value: float | str) -> str:
        """A value as a user would write it; a number is rounded, and nothing in it means anything to a shell."""
        if isinstance(value, str):
            return value
        number = self.rounded(value)
        return str(int(number)) if self.integer else repr(number).removesuffix(".0")


def parse_axes(texts: Sequence[str]) -> tuple[Axis, ...]:
    """One axis per `--space`.

    Raises:
        InvalidValueError: none, one of them is not of the form, or two have one name.
    """
    axes = tuple(Axis.parse(text) for text in texts)
    if not axes:
        raise InvalidValueError(f"nothing to tune; pass --space {_FORM}")
    names = [axis.name for axis in axes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidValueError(f"--space names {', '.join(twice)} twice; name each once")
    return axes
