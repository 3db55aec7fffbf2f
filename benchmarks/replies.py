"""An engine that changes what clients answer: for clients that attack, and for planted errors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sparsekit_fl as fl

__all__ = ["Changed"]

Change = Callable[[fl.Reply, int], fl.Reply]
"""A client's reply to a training, and the round → what the server gets."""


@dataclass(frozen=True)
class Changed:
    """One worker, whose clients train as everybody does."""

    change: Change
    workers = 1

    @contextmanager
    def open(self, *given: Any) -> Iterator[fl.engines.RunClients]:
        """Run clients in this process."""
        with fl.Processes().open(*given) as run_clients:

            def changed(requests: Sequence[fl.Request]) -> Iterator[fl.Reply]:
                for request, reply in zip(requests, run_clients(requests), strict=True):
                    yield self.change(reply, request.round) if request.task == "train" else reply

            yield changed
