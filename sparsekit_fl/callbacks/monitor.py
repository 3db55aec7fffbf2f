"""Monitoring: a callback that follows one number of each evaluation, to stop by it or to keep the best model."""

import json
import math
from collections.abc import Mapping
from typing import Any

from sparsekit.errors import InvalidValueError, nearest
from sparsekit_fl.callbacks.base import Callback, RunView
from sparsekit_fl.models import model_path, save_whole
from sparsekit_fl.results.scores import KINDS, PARTS, RoundScores, primary_metric
from sparsekit_fl.storage import write_atomically


class Monitoring(Callback):
    """Names a number, reads it from each evaluation, and keeps the best one in the checkpoint.

    Args:
        monitor: `PART.METRIC`, or `PART.METRIC.KIND`: PART is validation, personal or global, KIND is mean,
            weighted or worst_decile. Empty takes the mean of the first metric on the clients' own validation data: nothing is
            chosen by test data.
        min_delta: A number counts as better if it is so by more than this.

    Raises:
        InvalidValueError: no such part or kind.
    """

    def __init__(self, monitor: str = "", *, min_delta: float = 0.0) -> None:
        part, _, rest = (monitor or "validation").partition(".")
        metric, _, kind = rest.partition(".")
        if part not in PARTS:
            raise InvalidValueError(
                f"monitor must be PART.METRIC, as in 'validation.accuracy', got {monitor!r}; {nearest(part, PARTS)}"
            )
        if (kind or "mean") not in KINDS:
            raise InvalidValueError(f"monitor {monitor!r} ends with {kind!r}; {nearest(kind, KINDS)}")
        if not (math.isfinite(min_delta) and min_delta >= 0):
            raise InvalidValueError(f"min_delta must be a finite number >= 0, got {min_delta!r}")
        self._part, self._metric, self._kind = part, metric, kind or "mean"
        self._min_delta = min_delta
        self._begin()

    def _begin(self) -> None:
        self._best: float | None = None
        self._value: float | None = None
        self._round = self._waited = 0

    @property
    def text(self) -> str:
        """Part, metric and kind, as in `validation accuracy`."""
        return " ".join(filter(None, [self._part, self._metric, "" if self._kind == "mean" else self._kind]))

    def read(self, run: RunView, scores: RoundScores) -> float | None:
        """Return the number; None where this evaluation has none of that part.

        Raises:
            InvalidValueError: the problem has no such metric.
        """
        metric = self._metric or primary_metric(run.metrics)
        if metric not in run.metrics:
            raise InvalidValueError(f"no metric {metric!r} to monitor; {nearest(metric, run.metrics)}")
        return scores.over(self._part, self._kind).get(metric)

    def lower(self, run: RunView) -> bool:
        """Whether small values are the good ones."""
        return (self._metric or primary_metric(run.metrics)) in run.lower

    def improves(self, run: RunView, value: float, best: float | None) -> bool:
        """Whether a number is better than the best one so far; one that is not finite never is."""
        if not math.isfinite(value):
            return False
        return best is None or (best - value if self.lower(run) else value - best) > self._min_delta

    def on_run_start(self, run: RunView) -> None:
        self._begin()

    def on_evaluation(self, run: RunView, scores: RoundScores) -> None:
        value = self.read(run, scores)
        if value is None:
            return
        better = self.improves(run, value, self._best)
        if better:
            self._best, self._round = value, run.round
        self._value, self._waited = value, 0 if better else self._waited + 1
        self._followed(run, better)

    def _followed(self, run: RunView, better: bool) -> None:
        """Act on an evaluation."""

    def state(self) -> dict[str, Any]:
        # JSON has no number that is not finite.
        value = self._value if self._value is not None and math.isfinite(self._value) else None
        return {"best": self._best, "round": self._round, "value": value, "waited": self._waited}

    def load(self, run: RunView, state: Mapping[str, Any]) -> None:
        self._best, self._round = state["best"], state["round"]
        self._value, self._waited = state["value"], state["waited"]


class EarlyStopping(Monitoring):
    """Stop when a number has not got better for some evaluations in a row.

    Args:
        monitor: `PART.METRIC[.KIND]`, as in `validation.accuracy`; see `Monitoring`. Empty takes the first metric on validation
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
        what = self.text
        if self._target is not None and self._value is not None:
            low = self.lower(run)
            if self._value <= self._target if low else self._value >= self._target:
                run.stop(f"{what} reached {self._value:.4g}, the target is {self._target:g}")
        if self._waited >= self._patience:
            best = "was never a number" if self._best is None else f"was best in round {self._round}"
            run.stop(f"{what} {best} and has not got better for {self._waited} evaluations")

    def load(self, run: RunView, state: Mapping[str, Any]) -> None:
        """Go on waiting, or end a run that had ended."""
        super().load(run, state)
        self._followed(run, better=False)


class BestCheckpoint(Monitoring):
    """Write the global model to `models/best.safetensors` whenever a number is the best so far.

    `load_model(out, "best")` reads it. `models/best.json` says of which round it is, and how good; a resumed run
    goes on from there.

    Args:
        monitor: `PART.METRIC[.KIND]`, as in `global.accuracy` (score the global model along the way with `eval_global_every`);
            see `Monitoring`. Empty takes the first metric on validation data.
        min_delta: A number counts as better if it is so by more than this.
    """

    def __init__(self, monitor: str = "", *, min_delta: float = 0.0) -> None:
        super().__init__(monitor, min_delta=min_delta)

    def on_run_start(self, run: RunView) -> None:
        """Begin.

        Raises:
            InvalidValueError: the run has no folder.
        """
        if run.out is None:
            raise InvalidValueError("BestCheckpoint needs the folder of the run; give it one (out=, --out DIR)")
        super().on_run_start(run)

    def _followed(self, run: RunView, better: bool) -> None:
        if run.out is None or not better:
            return
        path = model_path(run.out, "best")
        path.parent.mkdir(exist_ok=True)
        save_whole(path, run.model())
        note = {"round": run.round, "monitor": self.text, "value": self._best}
        write_atomically(path.with_suffix(".json"), (json.dumps(note) + "\n").encode())
