"""LiveSearch: what a search does, on stderr: a line for each finished trial and, on a terminal, a bar below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from sparsekit.tuning.journal import Record
from sparsekit.tuning.knobs import Knob
from sparsekit.tuning.search import Observer, Search

__all__ = ["LiveSearch", "values_text"]


def values_text(knobs: Sequence[Knob], values: Mapping[str, float]) -> str:
    """The values as they stand in the command."""
    return " ".join(f"{knob.name}={knob.text(values[knob.name])}" for knob in knobs)


class LiveSearch(Observer, AbstractContextManager["LiveSearch"]):
    """Trials as they end, the best so far, and the time left.

    Args:
        quiet: Write nothing.
        console: Where to write; None takes stderr.
    """

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self._console = Console(stderr=True, highlight=False) if console is None else console
        self._quiet = quiet
        self._best = ""
        self._running: dict[int, str] = {}
        self._progress = Progress(
            SpinnerColumn(),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> LiveSearch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._progress.stop()

    def on_start(self, search: Search, trials: int) -> None:
        """Draw the bar; a search that goes on starts in its middle."""
        self._progress.update(self._task, total=trials, completed=len(search.records))
        self._remember(search)
        self._progress.start()
        if search.records and not self._quiet:
            self._console.print(f"going on after {len(search.records)} trials")

    def on_trial(self, search: Search, trial: int, values: Mapping[str, float]) -> None:
        """Name what runs."""
        self._running[trial] = values_text(search.knobs, values)
        self._describe()

    def _remember(self, search: Search) -> None:
        best = search.best()
        self._best = "" if best is None else f"best {best.metric:g};"

    def _describe(self) -> None:
        running = ", ".join(self._running.values())
        self._progress.update(self._task, description=f"{self._best} running {running}" if running else self._best)

    def on_record(self, search: Search, record: Record) -> None:
        """A line, and a step of the bar."""
        self._running.pop(record.trial, None)
        self._progress.update(self._task, completed=len(search.records))
        self._remember(search)
        self._describe()
        if self._quiet:
            return
        what = f"trial {record.trial}: {values_text(search.knobs, record.values)} → "
        if record.metric is None:
            self._console.print(f"{escape(what)}[red]failed[/red] ({escape(record.reason or '')})", soft_wrap=True)
            return
        best = search.best()
        new = best is not None and best.trial == record.trial
        self._console.print(f"{escape(what)}{record.metric:g}{'  [green]best[/green]' if new else ''}", soft_wrap=True)
