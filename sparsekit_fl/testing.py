"""A tiny problem, and contract suites that the author of a method or an engine inherits: say in a test file what to test, and
pytest runs the rest.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sparsekit.graph import StateDict
from sparsekit_fl.callbacks import Callback, RunView
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.messages import Evaluation, Update
from sparsekit_fl.config import RunConfig, TrainingConfig
from sparsekit_fl.engines import Engine, Processes
from sparsekit_fl.errors import ClientError, RunInterrupted
from sparsekit_fl.methods.base import Method
from sparsekit_fl.methods.client import Keep, Model, Result, Task, keep_model, kept_model, sgd
from sparsekit_fl.methods.whole_models import Local
from sparsekit_fl.problem.data import Capability, Client, ClientData, TensorData
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.results import RoundRecord, RunResult
from sparsekit_fl.rounds import run


class TinyNet(nn.Module):
    """Six inputs, eight hidden features with batch norm, three classes."""

    exits_before = ("last",)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits, float (batch, 3)."""
        logits: Tensor = self.last(torch.relu(self.norm(self.first(inputs))))
        return logits


def tiny_problem() -> Problem:
    """Return classify points by a linear rule."""
    return Problem(model=TinyNet, example_inputs=(torch.zeros(2, 6),))


def tiny_clients(count: int = 8, *, examples: int = 24) -> list[Client]:
    """Return clients with ids 0, 1, …; client k has examples + k mod 4 training examples and capability 1, 1/2 or 1/4."""
    rng = np.random.default_rng(7)
    rule = rng.normal(size=(6, 3))

    def split(size: int) -> TensorData:
        points = rng.normal(size=(size, 6))
        labels = (points @ rule).argmax(axis=1)
        return TensorData((torch.from_numpy(points.astype(np.float32)),), torch.from_numpy(labels))

    return [
        Client(
            id=number,
            data=ClientData(train=split(examples + number % 4), val=split(6), test=split(12)),
            capability=Capability(ratio=(1.0, 0.5, 0.25)[number % 3]),
        )
        for number in range(count)
    ]


def tiny_config(*, rounds: int = 4, seed: int = 3) -> RunConfig:
    """Return four clients a round, two epochs, evaluation every second round."""
    return RunConfig(
        rounds=rounds,
        cohort=4,
        training=TrainingConfig(local_epochs=2, batch_size=8, lr=0.1),
        seed=seed,
        eval_every=2,
        capability="dynamic",
        capability_levels=(1.0, 0.5, 0.25),
    )


def tiny_data(ids: Collection[int] | None = None) -> tuple[Problem, list[Client]]:
    """Return `tiny_problem` and those of `tiny_clients` that are asked for, as the command line or a Flower app loads them."""
    return tiny_problem(), [client for client in tiny_clients() if ids is None or client.id in ids]


class StopAfter(Callback):
    """Raise KeyboardInterrupt, as Ctrl-C does, when a round is saved."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        if record.round == self.round:
            raise KeyboardInterrupt


class MethodContract:
    """What holds for every method.

    Supply the fixture `make`, a function without arguments that returns the method::

        class TestMyMethod(MethodContract):
            @pytest.fixture
            def make(self):
                return my_method
    """

    def test_workers_and_interruptions_change_no_bit(self, make: Callable[[], Method], tmp_path: Path) -> None:
        method = make()
        before = repr(method)
        whole = _tiny_run(method)
        assert repr(method) == before, "a method is never changed"
        assert [record.round for record in whole.rounds] == [1, 2, 3, 4]
        assert all(not record.dropped for record in whole.rounds)
        assert 0.0 <= whole.final.personal["accuracy"] <= 1.0
        assert math.isfinite(whole.final.personal["loss"])
        assert len(whole.final.per_client) == 8
        cost = whole.cost
        assert min(cost.flops, cost.flops_paper, cost.uplink_bytes, cost.downlink_bytes, cost.seconds) > 0
        with pytest.raises(RunInterrupted):
            _tiny_run(make(), engine=Processes(2), out=tmp_path, callbacks=(StopAfter(2),))
        other = _tiny_run(make(), out=tmp_path, resume=True)
        assert other.final.state_sha256 == whole.final.state_sha256
        assert other.final.personal == whole.final.personal
        assert [record.ratios for record in other.rounds] == [record.ratios for record in whole.rounds]
        assert [record.loss for record in other.rounds] == [record.loss for record in whole.rounds]


def _tiny_run(method: Method, **options: Any) -> RunResult:
    return run(method, tiny_problem(), tiny_clients(), tiny_config(), **options)


@dataclass(frozen=True, kw_only=True)
class Failing(Method):
    """FedAvg that raises on some clients, and counts the participations of the others in their memories.

    Args:
        clients: Ids of those; None for all.
        unscored: Id of a client that cannot be scored; -1: all can.
    """

    clients: tuple[int, ...] | None = None
    unscored: int = -1

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train, or raise."""
        if self.clients is None or client.client.id in self.clients:
            raise ArithmeticError(f"no luck with {client.client.id}")
        client.memory["count"] = client.memory.get("count", 0) + 1
        return replace(sgd(client, task), extra={"count": torch.tensor([client.memory["count"]])})

    def deploy(self, client: ClientContext, state: StateDict) -> Model:
        """Return the global model, or raise."""
        if client.client.id == self.unscored:
            raise ArithmeticError(f"no score for {client.client.id}")
        return Model(state=state)


@dataclass(frozen=True, kw_only=True)
class OwnModels(Method):
    """FedAvg whose clients deploy models that they trained themselves.

    Args:
        keep: Which of them: the "last", the "best" on validation data, or the one of lowest "loss".
    """

    keep: Keep = "last"

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train, and keep the model."""
        result = sgd(client, task)
        keep_model(client, result, self.keep, task.ratio)
        return result

    def deploy(self, client: ClientContext, state: StateDict) -> Model:
        """Return the kept model."""
        return kept_model(client) or Model(state=state)


class _Watch(Callback):
    """Notes round, client, and number of participations of each client that trained."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def on_client_end(self, view: RunView, client_id: int, update: Update | Evaluation | None) -> None:
        if isinstance(update, Update):
            self.seen.append((view.round + 1, client_id, int(update.extra["count"])))


class EngineContract:
    """What holds for every engine; the fixture `engine`, a fresh one, is to be supplied.

    Set `rounding` where an engine computes in another order of operations.
    """

    rounding = 0.0
    """Largest relative and absolute difference of a run's weights from those of the default engine; 0: the same bits."""

    @pytest.mark.parametrize(
        "method",
        [Method(), Local(keep="best"), OwnModels()],
        ids=lambda method: method.name,
    )
    def test_same_results_as_the_default_engine(self, engine: Engine, method: Method, tmp_path: Path) -> None:
        ours, default = _tiny_run(method, engine=engine, out=tmp_path), _tiny_run(method)
        if self.rounding:
            torch.testing.assert_close(ours.state, default.state, rtol=self.rounding, atol=self.rounding)
        else:
            assert ours.final.state_sha256 == default.final.state_sha256
            assert ours.final.per_client == default.final.per_client
        assert replace(ours.cost, wall_seconds=0.0) == replace(default.cost, wall_seconds=0.0)
        if isinstance(method, OwnModels):  # personal models are written where they differ from the global one
            trained = {f"client-{client_id}" for record in ours.rounds for client_id in record.cohort}
            trained = set() if getattr(engine, "keeps_models", False) else trained
            assert {path.stem for path in (tmp_path / "models").glob("client-*.safetensors")} == trained

    def test_replies_come_in_the_order_of_the_cohort_and_memories_live_on(self, engine: Engine) -> None:
        watch = _Watch()
        result = _tiny_run(Failing(clients=()), engine=engine, callbacks=[watch])
        seen = [(round, client_id) for round, client_id, _ in watch.seen]
        assert seen == [(record.round, client_id) for record in result.rounds for client_id in record.cohort]
        counts = [[count for _, other, count in watch.seen if other == client_id] for client_id in range(8)]
        assert max(map(len, counts)) > 1
        assert all(found == list(range(1, len(found) + 1)) for found in counts)

    def test_a_failing_client_is_dropped_and_the_round_goes_on(self, engine: Engine) -> None:
        victim = _tiny_run(Method()).rounds[0].cohort[0]
        failing = Failing(clients=(victim,), unscored=1)
        result = _tiny_run(failing, engine=engine)
        (client_id, reason), *_ = result.rounds[0].dropped
        assert client_id == victim
        told = ("'failing", "in train()", "round 1", f"client {victim}", f"ArithmeticError: no luck with {victim}")
        assert all(part in reason for part in told)
        assert set(result.rounds[0].ratios) == set(result.rounds[0].cohort) - {victim}
        assert [evaluation.client_id for evaluation in result.final.per_client] == [0, *range(2, 8)]
        assert any("client 1 was not scored" in note and "no score for 1" in note for note in result.rounds[-1].notes)

    def test_when_every_client_fails_the_first_error_ends_the_run(self, engine: Engine) -> None:
        with pytest.raises(ClientError, match=r"in train\(\): ArithmeticError: no luck"):
            _tiny_run(Failing(), engine=engine)
