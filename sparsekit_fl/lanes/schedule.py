"""Which lanes take a step together: those whose next batches have one size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sparsekit_fl.training.loop import Batch, Batches

__all__ = ["Turn", "turns"]


@dataclass(frozen=True, eq=False)
class Turn:
    """A step of some lanes.

    Args:
        lanes: Who takes it, ascending.
        epochs: The epoch of each, from 0.
        batches: The batch of each; all of one size.
    """

    lanes: tuple[int, ...]
    epochs: tuple[int, ...]
    batches: tuple[Batch, ...]

    @property
    def size(self) -> int:
        """Number of examples in each batch."""
        return self.batches[0].size


def _numbered(batches: Batches) -> Iterator[tuple[int, Batch]]:
    for number, epoch in enumerate(batches):
        for batch in epoch:
            yield number, batch


def turns(lanes: Sequence[Batches]) -> Iterator[Turn]:
    """Yield steps until every lane has seen all its batches, each in its own order.

    The size of batch that most lanes wait for goes first, of equally many the larger one: a lane whose last batch of an
    epoch is small waits for others with such a batch. Lanes do not influence each other, so the order among them is free.

    Args:
        lanes: The epochs of each lane.
    """
    streams = [_numbered(batches) for batches in lanes]
    waiting = {place: found for place, stream in enumerate(streams) if (found := next(stream, None)) is not None}
    while waiting:
        sizes = Counter(batch.size for _, batch in waiting.values())
        size = max(sizes, key=lambda size: (sizes[size], size))
        ready = [place for place, (_, batch) in sorted(waiting.items()) if batch.size == size]
        taken = [waiting.pop(place) for place in ready]
        yield Turn(tuple(ready), tuple(epoch for epoch, _ in taken), tuple(batch for _, batch in taken))
        for place in ready:
            if (found := next(streams[place], None)) is not None:
                waiting[place] = found
