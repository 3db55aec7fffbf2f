"""track() and working(): progress of long work on stderr, by default if that is a terminal."""

import contextlib
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_drawing: list[str] = []
"""What is drawn now: a bar inside another one is not drawn."""


def _shown(show: bool | None) -> bool:
    if show is None:
        show = sys.stderr.isatty() and multiprocessing.parent_process() is None
    return show and not _drawing


def track(items: Iterable[_Item], description: str, *, show: bool | None, total: int | None = None) -> Iterator[_Item]:
    """Yield the items, and draw a bar on stderr meanwhile.

    Args:
        items: Anything that can be iterated over once.
        description: Text in front of the bar.
        show: Whether to draw; None draws if stderr is a terminal. A bar inside another one is never drawn.
        total: Number of items, if they have no length.
    """
    if not _shown(show):
        yield from items
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    if total is None and isinstance(items, Sized):
        total = len(items)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with _drawn(description, total, *columns) as advance:
        for item in items:
            yield item
            advance()


@contextlib.contextmanager
def working(description: str, *, show: bool | None) -> Iterator[None]:
    """Show a task and its time on stderr while the block runs; `show` is as in `track`."""
    if not _shown(show):
        yield
        return
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    with _drawn(description, None, SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()):
        yield


@contextlib.contextmanager
def _drawn(description: str, total: int | None, *columns: Any) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import Progress

    _drawing.append(description)
    try:
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(description, total=total)
            yield lambda: bar.advance(task)
    finally:
        _drawing.remove(description)
