"""TuneConfig: what a search tunes, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsekit.bandit.make import make_bandit
from sparsekit.errors import InvalidValueError
from sparsekit.tuning.command import CommandLine, Metric
from sparsekit.tuning.knobs import Knob, parse_knobs, space_of

__all__ = ["TuneConfig"]


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """What is tuned, and how.

    Args:
        command: For the shell, with `{name}` for each knob.
        space: The knobs, as `--space` says them.
        metric: A regular expression with one group.
        maximize: Whether a larger metric is better.
        bandit: By name.
        seed: Of the bandit.
        horizon: Expected number of trials, for bandits that use it.
        deterministic: Whether equal command lines give equal metrics, so that none is run twice.

    Raises:
        InvalidValueError: one of these is not allowed, or they do not fit together.
        UnknownNameError: no such bandit.
    """

    command: str
    space: tuple[str, ...]
    metric: str
    maximize: bool
    bandit: str
    seed: int
    horizon: int
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise InvalidValueError(f"--trials must be an integer >= 1, got {self.horizon}")
        if self.seed < 0:
            raise InvalidValueError(f"--seed must be an integer >= 0, got {self.seed}")
        self.line()
        Metric(self.metric)
        self.make()

    def knobs(self) -> tuple[Knob, ...]:
        """The numbers that are tuned."""
        return parse_knobs(self.space)

    def line(self) -> CommandLine:
        """The command with its marks."""
        return CommandLine(self.command, self.knobs())

    def make(self) -> Any:
        """A fresh bandit over the knobs."""
        knobs = self.knobs()
        space, rng = space_of(knobs), np.random.default_rng(self.seed)
        try:
            return make_bandit(self.bandit, space, rng=rng, horizon=self.horizon)
        except InvalidValueError as error:
            if len(knobs) > 1:
                raise InvalidValueError(f"{self.bandit} cannot tune {len(knobs)} numbers at once: {error}") from error
            raise
