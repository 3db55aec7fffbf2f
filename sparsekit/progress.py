"""track(): a progress bar on stderr around any iterable, only where it was asked for."""

from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

__all__ = ["track"]

_Item = TypeVar("_Item")


def track(items: Iterable[_Item], description: str, *, show: bool, total: int | None = None) -> Iterator[_Item]:
    """Yield the items, and draw a bar on stderr while they are worked on.

    Args:
        items: Anything that can be iterated over once.
        description: What is done, in front of the bar.
        show: Whether to draw; False only yields.
        total: Number of items; None asks `items`, and draws a bar without an end where it does not tell.
    """
    if not show:
        yield from items
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if total is None and isinstance(items, Sized):
        total = len(items)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=total)
        for item in items:
            yield item
            bar.advance(task)
