"""What a search runs: --space read as distributions, and Workers, whose scores and ends are told as Score and Ended."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from sparsekit.bandit.base import Interval
from sparsekit.errors import InvalidValueError

if TYPE_CHECKING:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution


@dataclass(frozen=True)
class Score:
    """The score of a trial under way.

    Args:
        step: When; counted by the trial.
        value: The score.
    """

    step: int
    value: float


@dataclass(frozen=True)
class Ended:
    """How a trial ended.

    Args:
        value: Its score; None where it has failed.
        reason: Why it has failed.
        facts: What else is noted of it, as JSON values by name.
    """

    value: float | None
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


class Workers(Protocol):
    """Runs trials, several at a time."""

    def start(self, number: int, values: Mapping[str, str]) -> None:
        """Begin a trial, by its number and the texts of its values."""

    def poll(self) -> Iterable[tuple[int, Score | Ended]]:
        """Wait a moment, and return what came of trials, by their numbers."""

    def stop(self, number: int) -> None:
        """End a trial that is not worth going on with."""


Axis: TypeAlias = "CategoricalDistribution | FloatDistribution | IntDistribution"

_FORM = (
    "NAME=LOW:HIGH, with :log or :int or both behind it, or NAME=A,B,C, as in lr=1e-4:1e-1:log, workers=1:64:log:int"
    " or batch_size=10,20,50"
)
_SIGNIFICANT = 6


def parse_axes(texts: Sequence[str]) -> dict[str, Axis]:
    """Name → distribution, one per `--space`.

    Raises:
        InvalidValueError: none, one of them is not of the form, its bounds make no range, or two have one name.
    """
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
        # Objects of one's own have a colon too: package.module:Class.
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


def ends(axis: Axis) -> tuple[str, ...]:
    """Texts to try before the first trial: both ends of a range, or every choice."""
    choices = getattr(axis, "choices", ())
    return tuple(text_of(axis, value) for value in choices or (axis.low, axis.high))  # type: ignore[union-attr]


def rounded(axis: Axis, value: float | str) -> float | str:
    """A number with as many digits as tell a millionth of its range apart (of a log scale, of the value), within the range."""
    if not isinstance(value, float):
        return value
    low, high = float(axis.low), float(axis.high)  # type: ignore[union-attr]
    spread = 1.0 if axis.log else max(abs(low), abs(high)) / (high - low)  # type: ignore[union-attr]
    digits = min(17, _SIGNIFICANT + max(0, math.ceil(math.log10(spread))))
    return min(max(float(f"{value:.{digits}g}"), low), high)


def text_of(axis: Axis, value: float | str) -> str:
    """A value as a user would write it; a number is rounded, and nothing in it means anything to a shell."""
    return str(rounded(axis, value)).removesuffix(".0") if isinstance(value, float) else str(value)
