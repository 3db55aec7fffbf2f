"""LiveProgress: a bar on stderr, drawn with rich. Silent where nobody looks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from sparsekit_fl.callbacks.base import Callback, RunView
from sparsekit_fl.client.messages import Evaluation, Update
from sparsekit_fl.results.records import RunResult
from sparsekit_fl.results.rounds import RoundRecord
from sparsekit_fl.results.scores import headline
from sparsekit_fl.results.text import flops_text, score_text


def bar(console: Console, *first: ProgressColumn, shown: bool, **options: Any) -> Progress:
    """Return a line of text, bar, facts, time and time left; nothing is drawn where nobody looks."""
    return Progress(
        *first,
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[facts]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not (shown and console.is_terminal),
        transient=True,
        expand=True,
        **options,
    )


class LiveProgress(Callback, AbstractContextManager["LiveProgress"]):
    """Round, accuracy, FLOPs so far and time left. Used as a context manager around the run.

    Args:
        quiet: Draw nothing.
        label: Text at the start of the line; empty for the method's name.
        console: Console to draw on; None takes stderr.
    """

    def __init__(self, *, quiet: bool = False, label: str = "", console: Console | None = None) -> None:
        self._label = label
        self._cohort = 1
        self._rounds = 0
        self._score = ""
        self._progress = bar(console or Console(stderr=True), SpinnerColumn(), shown=not quiet, refresh_per_second=4)
        self._task = self._progress.add_task(f"{label} preparing".strip(), total=None, facts="")

    def __enter__(self) -> LiveProgress:
        # Starts a thread, so only in on_run_start: worker processes are forked before.
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def on_run_start(self, run: RunView) -> None:
        """Draw the bar; a resumed run starts in its middle."""
        self._cohort, self._rounds = run.config.cohort, run.config.rounds
        self._label = self._label or run.method
        self._progress.update(self._task, total=self._rounds * self._cohort, completed=run.round * self._cohort)
        self._doing(run.round + 1)
        self._progress.start()

    def _doing(self, round: int, more: str = "") -> None:
        text = f"{self._label} round {min(round, self._rounds)}/{self._rounds}{more}"
        self._progress.update(self._task, description=text.strip())

    def on_client_end(self, run: RunView, client_id: int, work: Update | Evaluation | None) -> None:
        """Advance the bar by one client, or say that clients are being scored."""
        if isinstance(work, Evaluation):
            self._doing(run.round, ", scoring")
        else:
            self._progress.advance(self._task)

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        """Show the newest score, or training accuracy before there is one, and the FLOPs so far."""
        if record.evaluation is not None and record.evaluation.personal:
            name = headline(list(record.evaluation.personal))
            self._score = score_text(name, record.evaluation.personal[name])
        elif not self._score and record.accuracy is not None:
            self._score = f"training {score_text('accuracy', record.accuracy)}"
        facts = f"{self._score}  {flops_text(record.cost.flops_compact)} FLOPs".strip()
        self._progress.update(self._task, completed=record.round * self._cohort, facts=facts)
        self._doing(record.round + 1)

    def on_run_end(self, run: RunView, result: RunResult | None) -> None:
        self._progress.stop()
