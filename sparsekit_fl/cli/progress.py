"""Live progress on stderr: an observer that draws with rich, and draws nothing where nobody looks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sparsekit_fl.report.table import flops_text, share_text
from sparsekit_fl.results import Observer, RoundRecord, RunStart

if TYPE_CHECKING:
    from sparsekit_fl.messages import Evaluation, Update
    from sparsekit_fl.results import RunResult

__all__ = ["LiveProgress"]


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
        self._cohort, self._rounds = start.config.clients_per_round, start.config.rounds
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
