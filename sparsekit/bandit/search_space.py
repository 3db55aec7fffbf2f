"""Parse search spaces such as `lr=1e-4:1e-1:log` into Optuna's distributions, and write their values as text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from sparsekit.bandit.base import Interval
from sparsekit.errors import InvalidValueError

if TYPE_CHECKING:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

Axis: TypeAlias = "CategoricalDistribution | FloatDistribution | IntDistribution"

_FORM = (
    "NAME=LOW:HIGH, optionally followed by :log, :int or both, or NAME=A,B,C, as in lr=1e-4:1e-1:log, workers=1:64:log:int"
    " or batch_size=10,20,50"
)
_SIGNIFICANT = 6


def parse_axes(texts: Sequence[str]) -> dict[str, Axis]:
    """Parse one text per axis, and return name → distribution. Raises InvalidValueError for text in another format."""
    axes: dict[str, Axis] = {}
    for text in texts:
        name, equals, rest = (part.strip() for part in text.partition("="))
        if not (equals and re.fullmatch(r"[A-Za-z_][\w.]*", name)):
            raise InvalidValueError(f"--space must be {_FORM}, got {text!r}")
        if name in axes:
            raise InvalidValueError(f"--space names {name} twice; name each once")
        axes[name] = _parse(text, name, rest)
    if not axes:
        raise InvalidValueError(f"nothing to tune; pass --space {_FORM}")
    return axes


def _parse(text: str, name: str, rest: str) -> Axis:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    first, second, *words = (*(part.strip() for part in rest.split(":")), "", "")
    words = [word for word in words if word]
    try:
        low, high = float(first), float(second)
    except ValueError:
        # A choice may contain a colon, as package.module:Class does.
        choices = tuple(part.strip() for part in rest.split(",") if part.strip())
        if len(choices) < 2 or len(set(choices)) < len(choices):
            raise InvalidValueError(f"--space must be {_FORM}, with at least two different values, got {text!r}") from None
        return CategoricalDistribution(choices)
    if not set(words) <= {"log", "int"} or len(set(words)) < len(words):
        raise InvalidValueError(f"--space must be {_FORM}, got {text!r}")
    log = "log" in words
    if "int" in words and not (low.is_integer() and high.is_integer()):
        raise InvalidValueError(f"--space {text}: {name} takes whole numbers, so its bounds must be whole")
    if "int" in words and log and low < 1:
        raise InvalidValueError(f"--space {text}: whole numbers on a log scale begin at 1 or above")
    try:
        Interval(low, high, "log" if log else "linear")
    except InvalidValueError as error:
        raise InvalidValueError(f"--space {text}: {error}") from error
    return IntDistribution(int(low), int(high), log=log) if "int" in words else FloatDistribution(low, high, log=log)


def rounded(axis: Axis, value: float | str) -> float | str:
    """Round a number to about a millionth of its range (on a log scale, of its value), within the range."""
    if not isinstance(value, float):
        return value
    low, high = float(axis.low), float(axis.high)  # type: ignore[union-attr]
    spread = 1.0 if axis.log else max(abs(low), abs(high)) / (high - low)  # type: ignore[union-attr]
    digits = min(17, _SIGNIFICANT + max(0, math.ceil(math.log10(spread))))
    return min(max(float(f"{value:.{digits}g}"), low), high)


def text_of(axis: Axis, value: float | str) -> str:
    """Write a value as a user would; numbers are rounded, and contain nothing that a shell interprets."""
    return str(rounded(axis, value)).removesuffix(".0") if isinstance(value, float) else str(value)
