"""Monitor: one number of an evaluation; Monitoring: a callback that follows it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sparsekit.errors import InvalidValueError, nearest
from sparsekit_fl.callbacks.base import Callback, RunView
from sparsekit_fl.results.scores import RoundScores, headline

_PARTS = ("personal", "validation", "global")
_KINDS = ("mean", "weighted", "worst")


class Monitor:
    """Names a number, reads it, and says which way is better.

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

    @property
    def text(self) -> str:
        """Part, metric and kind, as in `validation accuracy`."""
        return " ".join(filter(None, [self._part, self._metric, "" if self._kind == "mean" else self._kind]))

    def read(self, run: RunView, scores: RoundScores) -> float | None:
        """Return the number; None where this evaluation has none of that part.

        Raises:
            InvalidValueError: the problem has no such metric.
        """
        means = {"personal": scores.personal, "validation": scores.validation, "global": scores.shared or {}}[self._part]
        if self._kind != "mean":
            means = (scores.weighted if self._kind == "weighted" else scores.worst).get(self._part, {})
        metric = self._metric or headline(run.metrics)
        if metric not in run.metrics:
            raise InvalidValueError(f"no metric {metric!r} to monitor; {nearest(metric, run.metrics)}")
        return means.get(metric)

    def lower(self, run: RunView) -> bool:
        """Whether small values are the good ones."""
        return (self._metric or headline(run.metrics)) in run.lower

    def improves(self, run: RunView, value: float, best: float | None) -> bool:
        """Whether a number is better than the best one so far; one that is not finite never is."""
        if not math.isfinite(value):
            return False
        return best is None or (best - value if self.lower(run) else value - best) > self._min_delta


class Monitoring(Callback):
    """A callback that follows a number of each evaluation, and keeps the best one in the checkpoint.

    Args:
        monitor: As of `Monitor`.
        min_delta: As of `Monitor`.
    """

    def __init__(self, monitor: str, *, min_delta: float) -> None:
        self._monitor = Monitor(monitor, min_delta=min_delta)
        self._begin()

    def _begin(self) -> None:
        self._best: float | None = None
        self._value: float | None = None
        self._round = self._waited = 0

    def on_run_start(self, run: RunView) -> None:
        self._begin()

    def on_evaluation(self, run: RunView, scores: RoundScores) -> None:
        value = self._monitor.read(run, scores)
        if value is None:
            return
        better = self._monitor.improves(run, value, self._best)
        if better:
            self._best, self._round = value, run.round
        self._value, self._waited = value, 0 if better else self._waited + 1
        self._followed(run, better)

    def _followed(self, run: RunView, better: bool) -> None:
        """Act on an evaluation."""

    def state(self) -> dict[str, Any]:
        """Return the best number, its round, the newest number, and for how long it has not got better."""
        # JSON has no number that is not finite.
        value = self._value if self._value is not None and math.isfinite(self._value) else None
        return {"best": self._best, "round": self._round, "value": value, "waited": self._waited}

    def load(self, run: RunView, state: Mapping[str, Any]) -> None:
        self._best, self._round = state["best"], state["round"]
        self._value, self._waited = state["value"], state["waited"]
