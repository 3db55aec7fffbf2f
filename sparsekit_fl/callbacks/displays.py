"""Displays: a bar on stderr, drawn with rich and silent where nobody looks; and a notebook's cell."""

from __future__ import annotations

import io
import time
from contextlib import AbstractContextManager
from html import escape
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

from sparsekit.errors import InvalidValueError, MissingDependencyError
from sparsekit_fl.callbacks.base import Callback, RunView
from sparsekit_fl.client.messages import Evaluation, Update
from sparsekit_fl.errors import need
from sparsekit_fl.results.frames import plot_rounds
from sparsekit_fl.results.records import RunResult
from sparsekit_fl.results.scores import RoundRecord, primary_metric
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
            name = primary_metric(list(record.evaluation.personal))
            self._score = score_text(name, record.evaluation.personal[name])
        elif not self._score and record.accuracy is not None:
            self._score = f"training {score_text('accuracy', record.accuracy)}"
        facts = f"{self._score}  {flops_text(record.cost.flops)} FLOPs".strip()
        self._progress.update(self._task, completed=record.round * self._cohort, facts=facts)
        self._doing(record.round + 1)

    def on_run_end(self, run: RunView, result: RunResult | None) -> None:
        self._progress.stop()


class NotebookDisplay(Callback):
    """Show a run in the cell that started it, with HTML alone, so that it needs no widgets.

    Args:
        metric: The metric of the curve; None takes accuracy, or the first one.
        seconds: Shortest time between two pictures.

    Raises:
        MissingDependencyError: IPython is not installed.
    """

    def __init__(self, *, metric: str | None = None, seconds: float = 0.3) -> None:
        self._display = need("IPython.display", "a notebook's display", extra="notebook")
        self._metric, self._seconds = metric, seconds
        self._drawn, self._records = 0.0, list[RoundRecord]()
        self._handle: Any = None

    def on_run_start(self, run: RunView) -> None:
        self._records = []
        self._handle = self._display.display(self._display.HTML(self.html(run)), display_id=True)

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        self._records.append(record)
        if time.monotonic() - self._drawn >= self._seconds:
            self._show(run, "")

    def on_run_end(self, run: RunView, result: RunResult | None) -> None:
        self._show(run, run.stopped or ("finished" if result is not None else "ended by an error"))

    def _show(self, run: RunView, state: str) -> None:
        self._drawn = time.monotonic()
        if self._handle is not None:
            self._handle.update(self._display.HTML(self.html(run, state)))

    def html(self, run: RunView, state: str = "") -> str:
        """Return the display as HTML.

        Args:
            run: The run.
            state: How it ended; empty while it runs.
        """
        facts = [f"round {run.round}/{run.config.rounds}", f"{flops_text(run.cost.flops)} FLOPs"]
        if self._records and self._records[-1].loss is not None:
            facts.append(f"training loss {self._records[-1].loss:.4f}")
        newest = next((one.evaluation.personal for one in reversed(self._records) if one.evaluation), {})
        facts += [score_text(name, value) for name, value in newest.items()]
        bar = f"<progress value='{run.round}' max='{run.config.rounds}'></progress>"
        return f"<div><b>{escape(run.method)}</b> {escape(state)} {bar} {escape(' · '.join(facts))}{self._curve()}</div>"

    def _curve(self) -> str:
        text = io.StringIO()
        try:
            plot_rounds(self._records, self._metric).savefig(text, format="svg")
        except (InvalidValueError, MissingDependencyError):
            return ""  # nothing was scored yet, or there is no matplotlib
        return text.getvalue()[text.getvalue().index("<svg") :]
