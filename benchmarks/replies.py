"""An engine that changes what clients answer: for clients that attack, and for planted errors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sparsekit_fl as fl
from sparsekit_fl.engines.base import ClientPool, Reply
from sparsekit_fl.engines.embedded import Embedded

__all__ = ["Changed"]

Change = Callable[[Reply, int], Reply]
"""A client's reply to a training, and the round → what the server gets."""


class _Pool:
    def __init__(self, pool: ClientPool, change: Change) -> None:
        self._pool, self._change = pool, change
        self.workers, self.evaluate = pool.workers, pool.evaluate

    def map(self, assignments: Sequence[Any], memory_rounds: Mapping[int, int]) -> Iterator[Reply]:
        for reply in self._pool.map(assignments, memory_rounds):
            yield self._change(reply, assignments[0].round)


@dataclass(frozen=True)
class Changed:
    """The embedded engine with one worker, whose clients train as everybody does."""

    change: Change

    def run(self, rounds: Callable[[ClientPool], fl.RunResult], **given: Any) -> fl.RunResult:
        """Run the loop."""
        return Embedded(1).run(lambda pool: rounds(_Pool(pool, self.change)), **given)
