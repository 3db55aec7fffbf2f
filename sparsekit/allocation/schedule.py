"""Schedules: the progress towards the budget after each step."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sparsekit.errors import InvalidValueError, UnknownNameError, nearest

SHAPES: Mapping[str, Callable[[float], float]] = {
    "one_shot": lambda _: 1.0,
    "linear": lambda time: time,
    "cubic": lambda time: 1.0 - (1.0 - time) ** 3,
    "cosine": lambda time: 0.5 - 0.5 * math.cos(math.pi * time),
}
"""Name → progress in [0, 1] after a share of the time in (0, 1]."""


@dataclass(frozen=True)
class Schedule:
    """Progress over steps: from the dense model to the budget.

    "one_shot" cuts everything at the first step, "linear" equal parts, "cubic" much at first and little at the end, "cosine"
    little at both ends.

    Args:
        shape: "one_shot", "linear", "cubic" or "cosine".
        steps: Number of steps after which the budget is met, at least 1.

    Raises:
        UnknownNameError: no such shape.
        InvalidValueError: fewer than one step.

    Source: Zhu and Gupta, To prune, or not to prune, 2017 (arXiv 1710.01878), for the cubic one.
    """

    shape: str = "one_shot"
    steps: int = 1

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise UnknownNameError(f"unknown schedule {self.shape!r}; {nearest(self.shape, SHAPES)}")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise InvalidValueError(f"a schedule needs at least one step, got steps={self.steps!r}")

    def progress(self, step: int) -> float:
        """Return the progress in [0, 1] after a number of steps: 0 before the first, 1 from the last one on."""
        if step <= 0:
            return 0.0
        return 1.0 if step >= self.steps else SHAPES[self.shape](step / self.steps)
