"""Callbacks: progress, TensorBoard, early stopping, and the best model."""

from __future__ import annotations

import importlib
import json
import math
import time
from typing import TYPE_CHECKING, Any, Self

from sparsekit.errors import InvalidValueError, nearest, require
from sparsekit.registry import Registry
from sparsekit.surgery import save_compact
from sparsekit_fl.checkpoint import write_atomically
from sparsekit_fl.client.messages import PARTS
from sparsekit_fl.models import model_path
from sparsekit_fl.problem.metrics import lower_is_better
from sparsekit_fl.results import CHOSEN_BY, Callback, RoundRecord, RunView
from sparsekit_fl.stored import number_text, primary_metric, score_text, texts

if TYPE_CHECKING:
    from rich.console import Console

_KINDS = {"best": "BestCheckpoint", "early-stopping": "EarlyStopping", "tensorboard": "TensorBoard"}
_OURS = {name: f"sparsekit_fl.callbacks:{kind}" for name, kind in _KINDS.items()}
loggers = Registry("logger", _OURS, group="sparsekit_fl.loggers")

__all__ = ["BestCheckpoint", "Callback", "EarlyStopping", "LiveProgress", "RunView", "TensorBoard", "loggers"]


class _Monitor(Callback):
    """Base of callbacks that monitor one number, the mean of a metric over clients."""

    def __init__(self, monitor: str = "") -> None:
        self._part, _, self._metric = (monitor or "validation").partition(".")
        if self._part not in CHOSEN_BY:
            tests = self._part in PARTS
            raise InvalidValueError(
                "monitor must be validation.METRIC, for the models that clients deploy, or global_validation.METRIC, for the"
                f" global model, got {monitor!r}"
                + (", which reads test data" if tests else f"; {nearest(self._part, CHOSEN_BY)}")
            )

    def on_run_start(self, run: RunView) -> None:
        self._name = self._metric or primary_metric((*run.metrics, "loss"))
        self._lower = lower_is_better(self._name, run.metrics.get(self._name))
        if run.records:  # the run may have been killed after a round was saved, before this callback was called
            self.on_round_end(run, run.records[-1])

    def _course(self, run: RunView) -> tuple[list[tuple[int, float]], int | None]:
        """Return (round, value) of each evaluation, and the index of the first best one; None if no value is finite."""
        scored = [(record.round, record.evaluation.part(self._part)) for record in run.records if record.evaluation]
        course = [(round, values[self._name]) for round, values in scored if self._name in values]
        later = self._part == "global_validation" and run.config.eval_global_every is not None
        if scored and not course and not later:
            raise InvalidValueError(
                f"{type(self).__name__} cannot monitor {self._part}.{self._name}, which is not scored; both parts need clients"
                " with validation data, global_validation also eval_global_every (--set eval_global_every=N), and every metric"
                f" a name of {sorted({*run.metrics, 'loss'})}"
            )
        sign = -1 if self._lower else 1
        finite = [place for place, (_, value) in enumerate(course) if math.isfinite(value)]
        return course, max(finite, key=lambda place: sign * course[place][1], default=None)


class EarlyStopping(_Monitor):
    """Stop a run when a number has not improved for some evaluations in a row, or has reached a target.

    Args:
        monitor: `PART.METRIC`, a mean over clients on their own validation data. PART is `validation` for the models that
            clients deploy, or `global_validation` for the global model. Empty: `validation` of accuracy, or without it of the
            first metric. Test data cannot be monitored.
        patience: Number of evaluations without an improvement after which the run ends.
        target: End the run as soon as the number is as good as this; None for no target.

    Raises:
        InvalidValueError: a value that is not allowed; at the first evaluation, a number that the run does not compute.
    """

    def __init__(self, monitor: str = "", *, patience: int = 5, target: float | None = None) -> None:
        super().__init__(monitor)
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise InvalidValueError(f"patience must be an integer >= 1, got {patience!r}")
        self._patience, self._target = patience, target

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        (course, best), text = self._course(run), f"{self._part} {self._metric}".strip()
        last = course[-1][1] if course else math.nan
        if self._target is not None and (last <= self._target if self._lower else last >= self._target):
            run.stop(f"{text} reached {last:.4g}, the target is {self._target:g}")
        waited = len(course) if best is None else len(course) - 1 - best
        if waited >= self._patience:
            when = "was never a number" if best is None else f"was best in round {course[best][0]}"
            run.stop(f"{text} {when} and has not improved for {waited} evaluations")


class BestCheckpoint(_Monitor):
    """Write the global model to `models/best.safetensors` whenever a monitored number improves.

    `load_model(out, "best")` loads it, and `models/best.json` has the round and the number. It also works in resumed runs.

    Args:
        monitor: As for `EarlyStopping`. `global_validation.accuracy` needs `eval_global_every`, which scores the global model
            in the run.

    Raises:
        InvalidValueError: a value that is not allowed; at the start of a run without a folder; at the first evaluation, a
            number that the run does not compute.
    """

    def on_run_start(self, run: RunView) -> None:
        if run.out is None:
            raise InvalidValueError("BestCheckpoint needs the folder of the run; give it one (out=, --out DIR)")
        super().on_run_start(run)

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        course, best = self._course(run)
        if run.out is None or best is None or course[best][0] != record.round:
            return
        path = model_path(run.out, "best")
        path.parent.mkdir(exist_ok=True)
        save_compact(run.model(), path)
        note = {"round": record.round, "monitor": f"{self._part}.{self._name}", "value": course[best][1]}
        write_atomically(path.with_suffix(".json"), (json.dumps(note) + "\n").encode())


class TensorBoard(Callback):
    """Write the numbers of every round into the folder `tensorboard` of the run. A resumed run continues the same curves.

    Tags are `train/loss`, `personal/accuracy`, `validation/…`, `global/…`, `cost/flops`, `round/dropped`, …; the step is the
    round.

    Raises:
        MissingDependencyError: tensorboard is not installed.
        InvalidValueError: at the start of a run without a folder.
    """

    def __init__(self) -> None:
        # Checked before the run, so that a missing package does not end it after hours.
        require("tensorboard")

    def on_run_start(self, run: RunView) -> None:
        if run.out is None:
            raise InvalidValueError("TensorBoard needs the folder of the run; give it one (out=, --out DIR)")
        writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        # purge_step drops the points of rounds that a killed run logged and that run again.
        self._writer = writer(str(run.out / "tensorboard"), purge_step=run.round + 1 if run.round else None)

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        for name, value in record.numbers().items():
            if value is not None and math.isfinite(value):
                group, _, rest = name.partition("_")
                if group not in ("train", "round", *PARTS):
                    group, rest = "round" if name in ("cohort", "dropped") else "cost", name
                self._writer.add_scalar(f"{group}/{rest}", value, record.round)
        self._writer.flush()


class LiveProgress(Callback):
    """Show round, scores, FLOPs and time left on stderr: a bar on a terminal, elsewhere a line per evaluation.

    Use it in a `with` block, so that the bar is removed however the run ends. A line starts with `label`, or else with the
    method's name.
    """

    def __init__(self, *, quiet: bool = False, label: str = "", console: Console | None = None) -> None:
        from rich import progress
        from rich.console import Console

        self._console = Console(stderr=True) if console is None else console
        self._lines = not (quiet or self._console.is_terminal)
        self._label, self._score, self._began = label, "", time.monotonic()
        text = progress.TextColumn("{task.description}", markup=False)
        ends = (progress.BarColumn(bar_width=None), progress.TimeElapsedColumn(), "left", progress.TimeRemainingColumn())
        self._bar = progress.Progress(
            text, *ends, console=self._console, disable=quiet or self._lines, transient=True, expand=True
        )
        self._task = self._bar.add_task(f"{label} preparing".strip(), total=None)

    def __enter__(self) -> Self:
        return self  # on_run_start starts the bar, which has a thread, after worker processes are forked

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def on_run_start(self, run: RunView) -> None:
        self._label = self._label or run.method
        self._bar.update(self._task, description=self._label, total=run.config.rounds, completed=run.round)
        self._bar.start()

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        # Every line has the unit prefix of the whole run (such as G or T).
        whole = record.cost.flops / record.round * run.config.rounds
        scores, flops = record.evaluation, f"{texts('flops', [record.cost.flops, whole])[0]} FLOPs"
        text = f"{self._label} round {record.round}/{run.config.rounds}"
        if scores is not None and scores.personal:
            name = primary_metric(scores.personal)
            self._score = score_text(name, scores.personal[name])
            if self._lines:
                valid = f"validation {score_text(name, scores.validation[name])}" if name in scores.validation else ""
                parts = filter(None, [self._score, valid, flops, number_text("seconds", time.monotonic() - self._began)])
                self._console.print(f"{text}: {', '.join(parts)}", markup=False, highlight=False, soft_wrap=True)
        self._bar.update(self._task, description=f"{text}  {self._score}  {flops}", completed=record.round)
