"""EarlyStopping: end a run that gets no better."""

from __future__ import annotations

from sparsekit.errors import InvalidValueError
from sparsekit_fl.callbacks.base import Callback, RunView
from sparsekit_fl.callbacks.monitor import Monitor
from sparsekit_fl.results.scores import RoundScores

__all__ = ["EarlyStopping"]


class EarlyStopping(Callback):
    """Stop when a number has not got better for some evaluations in a row.

    Args:
        monitor: `PART.METRIC[.KIND]`, as in `validation.accuracy`; see `Monitor`. Empty takes the first metric on validation
            data.
        patience: Number of evaluations without a better number after which the run ends.
        min_delta: A number counts as better if it is so by more than this.
        target: End the run as soon as the number is as good as this; None waits.

    Raises:
        InvalidValueError: a value that is not allowed.
    """

    def __init__(self, monitor: str = "", *, patience: int = 5, min_delta: float = 0.0, target: float | None = None) -> None:
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise InvalidValueError(f"patience must be an integer >= 1, got {patience!r}")
        self._monitor = Monitor(monitor, min_delta=min_delta)
        self._patience = patience
        self._target = target
        self._waited = 0

    def on_evaluation(self, run: RunView, scores: RoundScores) -> None:
        """Look whether it got better."""
        improved = self._monitor.improved(run, scores)
        if improved is None:
            return
        value = self._monitor.read(run, scores)
        if self._target is not None and value is not None and self._reached(run, value):
            run.stop(f"{self._monitor.text} reached {value:.4g}, the target is {self._target:g}")
        self._waited = 0 if improved else self._waited + 1
        if self._waited >= self._patience:
            best = "was never a number" if self._monitor.best is None else f"was best in round {self._monitor.round}"
            run.stop(f"{self._monitor.text} {best} and has not got better for {self._waited} evaluations")

    def _reached(self, run: RunView, value: float) -> bool:
        assert self._target is not None
        return value <= self._target if self._monitor.lower(run) else value >= self._target
