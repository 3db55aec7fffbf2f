"""NotebookDisplay: a bar, the newest scores and their curve, live in a notebook's cell."""

from __future__ import annotations

import io
import time
from html import escape
from typing import Any

from sparsekit.errors import InvalidValueError, MissingDependencyError
from sparsekit_fl.callbacks.base import Callback, RunView
from sparsekit_fl.errors import need
from sparsekit_fl.results.frames import plot_rounds
from sparsekit_fl.results.records import RunResult
from sparsekit_fl.results.rounds import RoundRecord
from sparsekit_fl.results.text import flops_text, score_text


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
        facts = [f"round {run.round}/{run.config.rounds}", f"{flops_text(run.cost.flops_compact)} FLOPs"]
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
