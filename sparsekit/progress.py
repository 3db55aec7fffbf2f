"""track() and working(): progress of long work on stderr, by default if that is a terminal."""

import contextlib
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_drawing: list[str] = []
"""Description of the bar that is drawn now. A bar inside another one is not drawn."""


def track(items: Iterable[_Item], description: str, *, show: bool | None, total: int | None = None) -> Iterator[_Item]:
    """Yield the items, and meanwhile draw a progress bar on stderr, labeled with `description`.

    `show`: None draws if stderr is a terminal and this is the main process. A bar inside another one is never drawn. `total`:
    number of items, if they have no length.
    """
    with _drawn(description, show, items, total) as advance:
        for item in items:
            yield item
            advance()


@contextlib.contextmanager
def working(description: str, *, show: bool | None) -> Iterator[None]:
    """Show a task and its time on stderr while the block runs; `show` is as in `track`."""
    with _drawn(description, show):
        yield


@contextlib.contextmanager
def _drawn(
    description: str, show: bool | None, items: Iterable[Any] | None = None, total: int | None = None
) -> Iterator[Callable[[], None]]:
    """Draw a bar for items, or time alone without items; yields the function to call after each item."""
    if show is None:
        show = sys.stderr.isatty() and multiprocessing.parent_process() is None
    if not show or _drawing:
        yield lambda: None
        return
    from rich import progress
    from rich.console import Console

    text = progress.TextColumn("{task.description}")
    columns: Any = (progress.SpinnerColumn(), text, progress.TimeElapsedColumn())
    if items is not None:
        columns = (text, progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeRemainingColumn())
    if total is None and isinstance(items, Sized):
        total = len(items)
    _drawing.append(description)
    try:
        with progress.Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(description, total=total)
            yield lambda: bar.advance(task)
    finally:
        _drawing.remove(description)
