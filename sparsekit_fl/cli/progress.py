"""Live progress on stderr, drawn with rich: of one run, or of the trials of a comparison. Silent where nobody looks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sparsekit_fl.report.table import flops_text, seconds_text, share_text
from sparsekit_fl.results.records import Observer, RoundRecord, RunStart

if TYPE_CHECKING:
    from sparsekit_fl.report.trials import Trial
    from sparsekit_fl.results.records import RunResult
    from sparsekit_fl.wire.messages import Evaluation, Update

__all__ = ["Events", "LiveProgress", "TrialsProgress"]


class LiveProgress(Observer, AbstractContextManager["LiveProgress"]):
    """Round, accuracy, FLOPs so far and time left. Used as a context manager around the run.

    Args:
        quiet: Draw nothing.
        label: Stands at the start of the line.
        console: Where to draw; None takes stderr.
    """

    def __init__(self, *, quiet: bool = False, label: str = "", console: Console | None = None) -> None:
        self._console = Console(stderr=True) if console is None else console
        self._label = label
        self._cohort = 1
        self._rounds = 0
        self._accuracy = ""
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
            transient=True,
            expand=True,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task(self._text("preparing"), total=None, facts="")

    def _text(self, doing: str) -> str:
        return f"{self._label} {doing}".strip()

    def __enter__(self) -> LiveProgress:
        # Starts a thread, so only in on_start: worker processes are forked before.
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._progress.stop()

    def on_start(self, start: RunStart) -> None:
        """Draw the bar; a resumed run starts in its middle."""
        self._cohort, self._rounds = start.config.cohort, start.config.rounds
        self._label = self._label or start.method
        self._progress.update(self._task, total=self._rounds * self._cohort, completed=start.round * self._cohort, facts="")
        self._doing(start.round + 1)
        self._progress.start()

    def _doing(self, round: int) -> None:
        self._progress.update(self._task, description=self._text(f"round {min(round, self._rounds)}/{self._rounds}"))

    def on_client(self, round: int, client_id: int, update: Update | None) -> None:
        """A step of the bar."""
        self._progress.advance(self._task)

    def on_evaluation(self, round: int, client_id: int, evaluation: Evaluation) -> None:
        """Say that clients are being scored."""
        self._progress.update(self._task, description=self._text(f"round {round}/{self._rounds}, scoring"))

    def on_round(self, record: RoundRecord) -> None:
        """Accuracy of the newest evaluation, or of training before there is one, and the FLOPs so far."""
        if record.evaluation is not None and "accuracy" in record.evaluation.personal:
            self._accuracy = f"accuracy {share_text(record.evaluation.personal['accuracy'])}"
        elif not self._accuracy.startswith("accuracy") and record.accuracy is not None:
            self._accuracy = f"training accuracy {share_text(record.accuracy)}"
        facts = "  ".join(part for part in (self._accuracy, f"{flops_text(record.cost.flops_compact)} FLOPs") if part)
        self._progress.update(self._task, completed=record.round * self._cohort, facts=facts)
        self._doing(record.round + 1)

    def on_end(self, result: RunResult) -> None:
        """Take the bar away."""
        self._progress.stop()


class Events(Observer):
    """An observer that passes on what a display needs, as plain JSON values, so that it may cross a pipe.

    Args:
        send: Is given one event at a time.
    """

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send

    def on_start(self, start: RunStart) -> None:
        """How much there is to do, and how much of it is done."""
        rounds, cohort = start.config.rounds, start.config.cohort
        self._send({"rounds": rounds, "cohort": cohort, "done": start.round})

    def on_client(self, round: int, client_id: int, update: Update | None) -> None:
        """One client more."""
        self._send({"client": round})

    def on_round(self, record: RoundRecord) -> None:
        """The round, and the accuracy where it was scored."""
        scores = {} if record.evaluation is None else record.evaluation.personal
        self._send({"round": record.round, "accuracy": scores.get("accuracy")})


class TrialsProgress(AbstractContextManager["TrialsProgress"]):
    """A bar over all trials with the time left, a bar for each that runs, and a line for each that ended.

    It has no thread of its own: a process that forks while another thread holds a lock would hang.

    Args:
        trials: How many there are.
        quiet: Draw nothing.
        console: Where to draw; None takes stderr.
    """

    def __init__(self, trials: int, *, quiet: bool = False, console: Console | None = None) -> None:
        self._console = Console(stderr=True) if console is None else console
        self._quiet = quiet
        self._trials = trials
        self._ended = 0
        self._shown = 0.0
        self._running: dict[str, _Running] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            auto_refresh=False,
            disable=quiet or not self._console.is_terminal,
            transient=True,
            expand=True,
            speed_estimate_period=3600,
        )
        self._all = self._progress.add_task(f"0/{trials} trials", total=trials, facts="")

    def __enter__(self) -> TrialsProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, label: str) -> None:
        """A trial starts."""
        task = self._progress.add_task(escape(f"{label}, preparing"), total=None, facts="")
        self._running[label] = _Running(task, time.monotonic())
        self._refresh()

    def event(self, label: str, event: Mapping[str, Any]) -> None:
        """Something happened in a trial.

        Args:
            label: Of the trial.
            event: From `Events`, or what the trial says under "said".
        """
        running = self._running[label]
        if "said" in event:
            self._say(f"{label}: {event['said']}")
            return
        if "rounds" in event:
            running.rounds, running.cohort, running.round = event["rounds"], event["cohort"], event["done"]
        elif "client" in event:
            running.clients += 1
        elif "round" in event:
            running.round, running.clients = event["round"], 0
            if event["accuracy"] is not None:
                running.facts = f"accuracy {share_text(event['accuracy'])}"
        text = f"{label}, round {min(running.round + 1, running.rounds)}/{running.rounds}"
        self._progress.update(running.task, description=escape(text), total=1.0, completed=running.share, facts=running.facts)
        self._refresh()

    def end(self, label: str, trial: Trial, *, ran: bool) -> None:
        """A trial ended.

        Args:
            label: Of the trial.
            trial: What came of it.
            ran: False where it was finished before.
        """
        self._ended += 1
        running = self._running.pop(label, None)
        if running is not None:
            self._progress.remove_task(running.task)
        if trial.result is None:
            text = f"failed: {trial.error}"
        else:
            accuracy = (trial.result["final"].get("personal") or {}).get("accuracy")
            text = "finished before" if not ran else "finished"
            text += "" if accuracy is None else f", accuracy {share_text(accuracy)}"
            if running is not None:
                text += f", {seconds_text(time.monotonic() - running.began)}"
        self._say(f"{self._ended}/{self._trials} {label}: {text}")
        self._progress.update(self._all, description=f"{self._ended}/{self._trials} trials")
        self._refresh(now=True)

    def tick(self) -> None:
        """Time passed."""
        self._refresh()

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _refresh(self, *, now: bool = False) -> None:
        moment = time.monotonic()
        if now or moment - self._shown > 0.25:
            self._shown = moment
            done = self._ended + sum(running.share for running in self._running.values())
            self._progress.update(self._all, completed=done)
            self._progress.refresh()


class _Running:
    """What is known of a trial that runs."""

    def __init__(self, task: TaskID, began: float) -> None:
        self.task = task
        self.began = began
        self.rounds, self.cohort, self.round, self.clients = 1, 1, 0, 0
        self.facts = ""

    @property
    def share(self) -> float:
        """How much of it is done, in [0, 1]."""
        return min(1.0, (self.round + min(1.0, self.clients / self.cohort)) / self.rounds)
