"""What a search runs: Workers run trials, whose scores and ends are told as Score and Ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


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
