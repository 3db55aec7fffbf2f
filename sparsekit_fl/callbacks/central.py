"""CentralTest: the global model is scored on one test set that belongs to no client."""

import json
from collections.abc import Mapping
from typing import Any

from sparsekit.errors import InvalidValueError
from sparsekit_fl.callbacks.base import Callback, RunView
from sparsekit_fl.client.loop import Examples, evaluate
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.results.part import plain
from sparsekit_fl.results.records import RunResult
from sparsekit_fl.results.scores import RoundRecord
from sparsekit_fl.storage import write_atomically

_FILE = "central.json"


class CentralTest(Callback):
    """Score the global model on a central test set, in the server's process, and keep the curve.

    With an output folder the curve is in `central.json`: one object a round with `round` and the value of each metric. A
    resumed run goes on with it. Statistics of batch norm are those of the global model.

    Args:
        problem: Loss and metrics.
        test: The examples, in any form that a client's test data may have.
        every: Score every N rounds, and after the last; None: in the rounds in which clients are scored.

    Attributes:
        curve: What was scored so far.
    """

    def __init__(self, problem: Problem, test: Any, *, every: int | None = None) -> None:
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise InvalidValueError(f"every must be an integer >= 1 or None, got {every!r}")
        if not hasattr(test, "__len__") or len(test) == 0:
            raise InvalidValueError("test must be a data set with at least one example")
        self._problem, self._test, self._every = problem, test, every
        self.curve: list[Mapping[str, float]] = []

    def on_run_start(self, run: RunView) -> None:
        self.curve = []
        file = None if run.out is None else run.out / _FILE
        if file is not None and run.round and file.exists():
            self.curve = [one for one in json.loads(file.read_text(encoding="utf-8")) if one["round"] <= run.round]

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        due = record.evaluation is not None if self._every is None else record.round % self._every == 0
        if due:
            self._score(run, record.round)

    def on_run_end(self, run: RunView, result: RunResult | None) -> None:
        if result is not None and (not self.curve or self.curve[-1]["round"] != run.round):
            self._score(run, run.round)

    def _score(self, run: RunView, round: int) -> None:
        device = run.config.device
        sums = evaluate(run.model().to(device), self._problem, Examples(self._problem, self._test, device=device))
        scores = {name: total / weight for name, (total, weight) in sums.items() if weight > 0}
        self.curve.append({"round": round, **scores})
        if run.out is not None:
            write_atomically(run.out / _FILE, (json.dumps(plain(self.curve), indent=1) + "\n").encode())
