"""Observed: an Observer, which is told of every client by itself, as a callback."""

from __future__ import annotations

from sparsekit_fl.callbacks.base import Callback, RunView
from sparsekit_fl.results.records import Observer, RoundRecord, RunResult, RunStart
from sparsekit_fl.wire.messages import Evaluation, Update

__all__ = ["Observed"]


class Observed(Callback):
    """Hands everything to an observer.

    Args:
        observer: The observer.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def on_run_start(self, run: RunView) -> None:
        """Hand on the start."""
        start = RunStart(method=run.method, config=run.config, clients=run.clients, round=run.round, cost=run.cost)
        self._observer.on_start(start)

    def on_client_end(self, run: RunView, client_id: int, work: Update | Evaluation | None) -> None:
        """Hand on the work of a client; `run.round` is the round before this one while clients train."""
        if isinstance(work, Evaluation):
            self._observer.on_evaluation(run.round, client_id, work)
        else:
            self._observer.on_client(run.round + 1, client_id, work)

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        """Hand on the record."""
        self._observer.on_round(record)

    def on_run_end(self, run: RunView, result: RunResult | None) -> None:
        """Hand on the result."""
        if result is not None:
            self._observer.on_end(result)
