"""EarlyStopping: end a run that gets no better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsekit.errors import InvalidValueError
from sparsekit_fl.callbacks.base import RunView
from sparsekit_fl.callbacks.monitor import Monitoring


class EarlyStopping(Monitoring):
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
        super().__init__(monitor, min_delta=min_delta)
        self._patience = patience
        self._target = target

    def _followed(self, run: RunView, better: bool) -> None:
        what = self._monitor.text
        if self._target is not None and self._value is not None:
            low = self._monitor.lower(run)
            if self._value <= self._target if low else self._value >= self._target:
                run.stop(f"{what} reached {self._value:.4g}, the target is {self._target:g}")
        if self._waited >= self._patience:
            best = "was never a number" if self._best is None else f"was best in round {self._round}"
            run.stop(f"{what} {best} and has not got better for {self._waited} evaluations")

    def load(self, run: RunView, state: Mapping[str, Any]) -> None:
        """Go on waiting, or end a run that had ended."""
        super().load(run, state)
        self._followed(run, better=False)
