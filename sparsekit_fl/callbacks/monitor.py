"""Monitor: one number of an evaluation, and whether it is the best one so far."""

from __future__ import annotations

import math

from sparsekit.errors import InvalidValueError, nearest
from sparsekit_fl.callbacks.base import RunView
from sparsekit_fl.results.scores import RoundScores, headline

__all__ = ["Monitor"]

_PARTS = ("personal", "validation", "global")
_KINDS = ("mean", "weighted", "worst")


class Monitor:
    """Reads a number, and remembers the best one.

    Args:
        name: `PART.METRIC`, or `PART.METRIC.KIND`: PART is validation, personal or global, KIND is mean, weighted or worst.
            Empty takes the mean of the first metric on the clients' own validation data: nothing is chosen by test data.
        min_delta: A number counts as better if it is so by more than this.

    Raises:
        InvalidValueError: no such part or kind.
    """

    def __init__(self, name: str = "", *, min_delta: float = 0.0) -> None:
        part, _, rest = (name or "validation").partition(".")
        metric, _, kind = rest.partition(".")
        if part not in _PARTS:
            raise InvalidValueError(
                f"monitor must be PART.METRIC, as in 'validation.accuracy', got {name!r}; {nearest(part, _PARTS)}"
            )
        if (kind or "mean") not in _KINDS:
            raise InvalidValueError(f"monitor {name!r} ends with {kind!r}; {nearest(kind, _KINDS)}")
        if not (math.isfinite(min_delta) and min_delta >= 0):
            raise InvalidValueError(f"min_delta must be a finite number >= 0, got {min_delta!r}")
        self._part, self._metric, self._kind = part, metric, kind or "mean"
        self._min_delta = min_delta
        self.best: float | None = None
        self.round = 0

    @property
    def text(self) -> str:
        """Part, metric and kind, as in `validation accuracy`."""
        return " ".join([self._part, self._metric, *([] if self._kind == "mean" else [self._kind])])

    def read(self, run: RunView, scores: RoundScores) -> float | None:
        """Return the number; None where this evaluation has none of that part.

        Raises:
            InvalidValueError: the problem has no such metric.
        """
        means = {"personal": scores.personal, "validation": scores.validation, "global": scores.shared or {}}[self._part]
        if self._kind != "mean":
            means = (scores.weighted if self._kind == "weighted" else scores.worst).get(self._part, {})
        if not self._metric:
            self._metric = headline(run.metrics)
        if self._metric not in run.metrics:
            raise InvalidValueError(f"no metric {self._metric!r} to monitor; {nearest(self._metric, run.metrics)}")
        return means.get(self._metric)

    def lower(self, run: RunView) -> bool:
        """Whether small values are the good ones; after the first `read`."""
        return self._metric in run.lower

    def improved(self, run: RunView, scores: RoundScores) -> bool | None:
        """Whether the number of this evaluation is the best one so far; None where there is none."""
        value = self.read(run, scores)
        if value is None:
            return None
        if not math.isfinite(value):
            return False
        better = self.best is None or (self.best - value if self.lower(run) else value - self.best) > self._min_delta
        if better:
            self.best, self.round = value, run.round
        return better
