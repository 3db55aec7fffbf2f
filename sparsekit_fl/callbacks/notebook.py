"""NotebookDisplay: a bar, a table of the newest evaluations and their curve, live in a notebook's cell."""

from __future__ import annotations

import importlib
import time
from html import escape
from typing import Any

from sparsekit.errors import MissingDependencyError, install_hint
from sparsekit_fl.callbacks.base import Callback, RunView
from sparsekit_fl.results.records import RoundRecord, RunResult
from sparsekit_fl.results.scores import headline
from sparsekit_fl.results.text import flops_text, seconds_text, share_text

__all__ = ["NotebookDisplay"]

_WIDTH, _HEIGHT = 480, 120
_LINES = (("personal", "#0072B2"), ("global", "#D55E00"))


class NotebookDisplay(Callback):
    """Show a run in the cell that started it. It draws with HTML and SVG alone, so it needs no widgets.

    Args:
        rows: Number of the newest evaluations in the table.
        metric: The metric of the curve; None takes accuracy, or the first one.
        seconds: Shortest time between two pictures.

    Raises:
        MissingDependencyError: IPython is not installed.
    """

    def __init__(self, *, rows: int = 5, metric: str | None = None, seconds: float = 0.3) -> None:
        try:
            self._display: Any = importlib.import_module("IPython.display")
        except ImportError as error:
            raise MissingDependencyError(f"a notebook's display needs IPython; {install_hint('notebook')}") from error
        self._rows = rows
        self._metric = metric
        self._seconds = seconds
        self._drawn = 0.0
        self._began = time.monotonic()
        self._scored: list[RoundRecord] = []
        self._newest: RoundRecord | None = None
        self._handle: Any = None

    def on_run_start(self, run: RunView) -> None:
        """Show an empty table."""
        self._scored, self._newest, self._began = [], None, time.monotonic()
        self._metric = self._metric or headline(run.metrics)
        self._handle = self._display.display(self._display.HTML(self.html(run)), display_id=True)

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        """Show the round."""
        self._newest = record
        if record.evaluation is not None:
            self._scored.append(record)
        if time.monotonic() - self._drawn >= self._seconds:
            self._draw(run)

    def on_run_end(self, run: RunView, result: RunResult | None) -> None:
        """Show the end, or that there was none."""
        if self._handle is not None:
            self._draw(run, run.stopped or ("finished" if result is not None else "ended by an error"))

    def _draw(self, run: RunView, state: str = "") -> None:
        self._drawn = time.monotonic()
        if self._handle is not None:
            self._handle.update(self._display.HTML(self.html(run, state)))

    def html(self, run: RunView, state: str = "") -> str:
        """Return the display as HTML.

        Args:
            run: The run.
            state: How it ended; empty while it runs.
        """
        done, rounds = run.round, run.config.rounds
        facts = [f"round {done}/{rounds}", f"{flops_text(run.cost.flops_compact)} FLOPs",
                 seconds_text(time.monotonic() - self._began)]  # fmt: skip
        if self._newest is not None and self._newest.loss is not None:
            facts.insert(1, f"training loss {self._newest.loss:.4f}")
        head = f"<b>{escape(run.method)}</b> {escape(state)} <progress value='{done}' max='{rounds}'></progress> "
        return f"<div>{head}{escape(' · '.join(facts))}{self._curve(rounds)}{self._table()}</div>"

    def _curve(self, rounds: int) -> str:
        lines = []
        for part, colour in _LINES:
            points = [(record.round, self._value(record, part)) for record in self._scored]
            known = [(round, value) for round, value in points if value is not None]
            if len(known) > 1:
                lines.append((part, colour, known))
        if not lines:
            return ""
        values = [value for _, _, known in lines for _, value in known]
        low, high = (0.0, 1.0) if self._metric == "accuracy" else (min(values), max(values))
        span = (high - low) or 1.0
        drawn = ""
        for part, colour, known in lines:
            path = " ".join(f"{_WIDTH * x / rounds:.1f},{_HEIGHT * (1 - (y - low) / span):.1f}" for x, y in known)
            drawn += (
                f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'><title>{part}</title></polyline>"
            )
        label = f"{escape(self._metric or '')} from {low:.3g} to {high:.3g}"
        box = f"<rect width='{_WIDTH}' height='{_HEIGHT}' fill='none' stroke='#DDDDDD'/>"
        return f"<br><svg width='{_WIDTH}' height='{_HEIGHT}' role='img' aria-label='{label}'>{box}{drawn}</svg>"

    def _value(self, record: RoundRecord, part: str) -> float | None:
        assert record.evaluation is not None
        means = record.evaluation.personal if part == "personal" else record.evaluation.shared
        return (means or {}).get(self._metric or "")

    def _table(self) -> str:
        newest = self._scored[-self._rows :]
        if not newest:
            return ""
        names = list(dict.fromkeys(name for one in newest if one.evaluation for name in one.evaluation.personal))
        head = "".join(f"<th>{escape(name)}</th><th>worst tenth</th>" for name in names)
        rows = ""
        for record in newest:
            assert record.evaluation is not None
            cells = ""
            for name in names:
                worst = record.evaluation.worst.get("personal", {})
                for value in (record.evaluation.personal.get(name), worst.get(name)):
                    text = "–" if value is None else share_text(value) if name == "accuracy" else f"{value:.4g}"
                    cells += f"<td>{text}</td>"
            rows += f"<tr><td>{record.round}</td>{cells}</tr>"
        return f"<table><tr><th>round</th>{head}</tr>{rows}</table>"
