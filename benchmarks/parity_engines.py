"""How benchmarks/parity.py runs a plan on each engine, with and without clients that fail; what it gives is a run's result."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replies import Changed

from sparsekit_fl.deployment.plan import Plan
from sparsekit_fl.engines.base import Engine, Reply
from sparsekit_fl.engines.embedded import Embedded
from sparsekit_fl.engines.flower import Flower
from sparsekit_fl.engines.flower.wire import read
from sparsekit_fl.errors import ClientError
from sparsekit_fl.server.loop import run

TESTS = Path(__file__).resolve().parent.parent / "tests"
HELPERS = TESTS / "sparsekit_fl" / "engines" / "flower"
sys.path.append(str(TESTS))

from local_grid import InProcess  # noqa: E402

CLIENTS = 20
# Three rounds of seven are more than the clients there are: whoever is sampled, some client meets its memory again.
COHORT = 7

Result = Mapping[str, Any]
"""What `RunResult.to_dict` gives."""


def plan_of(method: str, rounds: int) -> Plan:
    """The settings: a convolutional model on scikit-learn's digits, two classes a client, levels drawn in every round."""
    return Plan(method=method, rounds=rounds, cohort=COHORT, seed=3, eval_every=rounds, local_epochs=1)


def fails(client_id: int, round: int) -> bool:
    """Whom an error is planted in: at most 3 of the 20 clients in a round, so that more than half of a cohort answers."""
    return (client_id + round) % 7 == 0


def _lost(reply: Reply, round: int) -> Reply:
    planted = fails(reply.client_id, round)
    return Reply(client_id=reply.client_id, error=ClientError("planted")) if planted else reply


def _error_reply(message: Any, reply: Any) -> Any:
    from flwr.app import Error, Message

    task = read(message)[0]["tasks"][0]
    planted = task["task"] == "train" and fails(task["client"], task["round"])
    return Message(Error(code=5, reason="planted"), reply_to=message) if planted else reply


def _here(engine: Callable[[], Engine]) -> Callable[[Plan], Result]:
    def result(plan: Plan) -> Result:
        problem, clients = plan.make_problem()
        return run(plan.make_method(), problem, clients, plan.make_config(len(clients)), engine=engine()).to_dict()

    return result


@dataclass
class Deployed:
    """One SuperLink with two SuperNodes, started with the first run and kept for the others; anew after one that failed."""

    _stack: ExitStack = field(default_factory=ExitStack)
    _deployment: Any = None

    def __call__(self, plan: Plan) -> Result:
        """Submit a run and wait for what it reports."""
        try:
            deployment = self._deployment or self._start()
            out = deployment.folder / plan.method
            deployment.submit(plan.replaced(out=str(out)))
            found: Result = deployment.await_result(out)
        except BaseException:
            # It shows the end of its logs when it is told of an error.
            self._deployment = None
            self._stack.__exit__(*sys.exc_info())
            raise
        return found

    def _start(self) -> Any:
        # The tests' own, which also watches that no process contacts anybody outside this machine.
        sys.path.append(str(HELPERS))
        helpers = importlib.import_module("fault_deployment")
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="sparsekit-")))
        deployment = self._stack.enter_context(helpers.Deployment(folder, planted=False, tls=True))
        deployment.start_superlink()
        for key, clients in enumerate((f"0-{CLIENTS // 2 - 1}", f"{CLIENTS // 2}-{CLIENTS - 1}")):
            deployment.register(key)
            deployment.start_node(f"node-{key}", clients, key=key)
        self._deployment = deployment
        return deployment

    def close(self) -> None:
        """Stop it; fails where a process contacted somebody outside this machine."""
        self._stack.close()


@dataclass(frozen=True)
class Column:
    """An engine of the page.

    Args:
        title: Over its column.
        run: What a plan gives on it.
        errors: Whether clients fail on it, so that the reference is the embedded engine where the same ones fail.
        close: Called after its last run.
    """

    title: str
    run: Callable[[Plan], Result]
    errors: bool = False
    close: Callable[[], None] = lambda: None


_deployed = Deployed()
_with_errors = _here(lambda: Changed(_lost))


def _failing(plan: Plan) -> Result:
    result = _with_errors(plan)
    assert any(record["dropped"] for record in result["rounds"]), f"{plan.method}: no error fell on a client of a cohort"
    return result


# By whether clients fail.
REFERENCES: dict[bool, Callable[[Plan], Result]] = {False: _here(lambda: Embedded(1)), True: _failing}
# Those that fork come first, before there are threads.
COLUMNS = {
    "embedded-2": Column("embedded, 2 workers", _here(lambda: Embedded(2))),
    "grid": Column("Flower's wire, replies shuffled and doubled", _here(lambda: InProcess(nodes=3, seed=5, twice=True))),
    "grid-errors": Column(
        "Flower's wire, clients fail", _here(lambda: InProcess(nodes=3, seed=6, fault=_error_reply)), errors=True
    ),
    "ray": Column("Ray, 2 actors", _here(lambda: Flower(workers=2, supernodes=3))),
    "deployment": Column("SuperLink and 2 SuperNodes", _deployed, close=_deployed.close),
}
