"""Knob: a number in a command line that is to be tuned, as `--space` says it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sparsekit.bandit.base import Interval
from sparsekit.bandit.space import Box
from sparsekit.errors import InvalidValueError

__all__ = ["Knob", "parse_knobs", "space_of"]

_FORM = "NAME=LOW:HIGH, with :log or :int or both behind it, as in lr=1e-4:1e-1:log or workers=1:64:log:int"
_SIGNIFICANT = 6


@dataclass(frozen=True, kw_only=True)
class Knob:
    """A number to be tuned.

    Args:
        name: Stands in the command as `{name}`.
        low: The smallest value.
        high: The largest value, above `low`.
        scale: "log" where the order of magnitude matters, else "linear".
        integer: Whole numbers only.

    Raises:
        InvalidValueError: the bounds make no interval, or an integer's bounds are not whole.
    """

    name: str
    low: float
    high: float
    scale: Literal["linear", "log"] = "linear"
    integer: bool = False

    def __post_init__(self) -> None:
        if self.integer and not (float(self.low).is_integer() and float(self.high).is_integer()):
            raise InvalidValueError(f"{self.name} takes whole numbers, so its bounds must be whole, got {self.low}:{self.high}")
        if self.integer and self.scale == "log" and self.low < 1:
            raise InvalidValueError(f"whole numbers on a log scale begin at 1 or above, got {self.name}={self.low:g}")
        Interval(self.low, self.high, self.scale)

    @staticmethod
    def parse(text: str) -> Knob:
        """Read what stands behind `--space`.

        Raises:
            InvalidValueError: not of the form, or the bounds make no interval.
        """
        name, equals, rest = text.partition("=")
        parts = [part.strip() for part in rest.split(":")]
        words, name = parts[2:], name.strip()
        formed = bool(equals) and len(parts) >= 2 and re.fullmatch(r"[A-Za-z_]\w*", name) is not None
        known = sorted(words) in ([], ["int"], ["linear"], ["log"], ["int", "linear"], ["int", "log"])
        if not (formed and known):
            raise InvalidValueError(f"--space must be {_FORM}, got {text!r}")
        if name == "trial":
            raise InvalidValueError(
                "--space cannot be named trial, since {trial} is the number of the trial; take another name"
            )
        try:
            low, high = (float(part) for part in parts[:2])
        except ValueError:
            raise InvalidValueError(f"the bounds of --space must be numbers, got {text!r}; write {_FORM}") from None
        try:
            return Knob(name=name, low=low, high=high, scale="log" if "log" in words else "linear", integer="int" in words)
        except InvalidValueError as error:
            raise InvalidValueError(f"--space {text}: {error}") from error

    @property
    def interval(self) -> Interval:
        """What a bandit searches; half a step wider at both ends for whole numbers, so that all are drawn as often."""
        half = 0.5 if self.integer else 0.0
        return Interval(self.low - half, self.high + half, self.scale)

    def executed(self, value: float) -> float:
        """The value that is put into the command where the bandit proposed `value`: rounded, and within the bounds."""
        if self.integer:
            rounded = float(math.floor(value + 0.5))
        else:
            largest = max(abs(self.low), abs(self.high))
            # As many digits as tell a millionth of the interval apart; of a log scale, of the value.
            spread = 1.0 if self.scale == "log" else largest / (self.high - self.low)
            digits = min(17, _SIGNIFICANT + max(0, math.ceil(math.log10(spread))))
            rounded = float(f"{value:.{digits}g}")
        return min(max(rounded, self.low), self.high)

    def text(self, value: float) -> str:
        """`value` as it stands in the command: digits, a sign, a point and an exponent, nothing a shell could read."""
        return str(int(value)) if self.integer else repr(float(value)).removesuffix(".0")

    def __str__(self) -> str:
        words = [word for word, said in (("log", self.scale == "log"), ("int", self.integer)) if said]
        return ":".join([f"{self.name}={self.low:g}", f"{self.high:g}", *words])


def parse_knobs(texts: Sequence[str]) -> tuple[Knob, ...]:
    """One knob per `--space`.

    Raises:
        InvalidValueError: none, one of them is not of the form, or two have one name.
    """
    knobs = tuple(Knob.parse(text) for text in texts)
    if not knobs:
        raise InvalidValueError(f"nothing to tune; pass --space {_FORM}")
    names = [knob.name for knob in knobs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidValueError(f"--space names {', '.join(twice)} twice; name each number once")
    return knobs


def space_of(knobs: Sequence[Knob]) -> Interval | Box:
    """What a bandit searches for these knobs: the interval of a single one, a box of several."""
    if len(knobs) == 1:
        return knobs[0].interval
    return Box({knob.name: knob.interval for knob in knobs})
