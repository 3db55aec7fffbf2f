"""A tiny problem, and tests that every method must pass: inherit `MethodContract` in a test file to run them with pytest."""

import dataclasses
import math
import tempfile
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np
import torch
from torch import Tensor, nn

from sparsekit.errors import SparsekitError
from sparsekit_fl.callbacks import Callback, RunView
from sparsekit_fl.checkpoint import Memories
from sparsekit_fl.client.messages import Reply, Update
from sparsekit_fl.config import Deploy, RunConfig, TrainingConfig
from sparsekit_fl.engines import Processes
from sparsekit_fl.errors import ClientError, RunInterrupted, UpdateError
from sparsekit_fl.methods.adapters import Adapters
from sparsekit_fl.methods.base import Method
from sparsekit_fl.problem.data import Capability, Client, ClientData, TensorData
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.results import RoundRecord, RunResult
from sparsekit_fl.rounds import run
from sparsekit_fl.server import Server
from sparsekit_fl.spec import RunSpec, answer, by_id


class TinyNet(nn.Module):
    """Six inputs, eight hidden features with batch norm, three classes."""

    exits_before = ("last",)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.last(torch.relu(self.norm(self.first(inputs))))
        return logits


def tiny_problem() -> Problem:
    """Return the problem of classifying points by a linear rule."""
    return Problem(model=TinyNet, example_inputs=(torch.zeros(2, 6),))


def adapter_problem() -> Problem:
    """Return the same for a network with a low-rank adapter on a frozen layer."""
    return Problem(model=partial(OtherNet, "adapters"), example_inputs=(torch.zeros(2, 6),))


def problem_of(method: Method) -> Problem:
    """Return the problem above on which a method works."""
    return adapter_problem() if isinstance(method, Adapters) else tiny_problem()


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
    """Return a configuration with four clients a round, two epochs, and evaluation every second round."""
    return RunConfig(
        rounds=rounds,
        cohort=4,
        training=TrainingConfig(local_epochs=2, batch_size=8, lr=0.1),
        seed=seed,
        eval_every=2,
        redraw_capability=True,
        capability_levels=(1.0, 0.5, 0.25),
    )


def tiny_data(ids: Collection[int] | None = None) -> tuple[Problem, list[Client]]:
    """Return `tiny_problem` and the `tiny_clients` with these ids (None: all): a factory for the command line and Flower."""
    return tiny_problem(), [client for client in tiny_clients() if ids is None or client.id in ids]


class StopAfter(Callback):
    """Callback that raises KeyboardInterrupt, as Ctrl-C does, once the given round is saved."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        if record.round == self.round:
            raise KeyboardInterrupt


class MethodContract:
    """Tests that every method must pass.

    Supply the fixture `make`, a function without arguments that returns the method::

        class TestMyMethod(MethodContract):
            @pytest.fixture
            def make(self):
                return my_method

    If it needs another model than a small classifier with batch norm, give the class a `problem` too.
    Its model takes the inputs of `tiny_problem`, six numbers, and gives three logits.
    """

    problem: ClassVar[Problem] = tiny_problem()

    def test_workers_and_interruptions_change_no_bit(self, make: Callable[[], Method], tmp_path: Path) -> None:
        import pytest  # here, since processes that load `tiny_data` need none

        method, tiny_run = make(), self._run
        before = repr(method)
        whole = tiny_run(method)
        assert repr(method) == before, "a method is never changed"
        assert [record.round for record in whole.rounds] == [1, 2, 3, 4]
        assert all(not record.dropped for record in whole.rounds)
        assert 0.0 <= whole.final.personal["accuracy"] <= 1.0
        assert math.isfinite(whole.final.personal["loss"])
        assert len(whole.final.per_client) == 8
        cost = whole.cost
        assert min(cost.flops, cost.flops_paper, cost.uplink_bytes, cost.downlink_bytes, cost.seconds) > 0
        with pytest.raises(RunInterrupted):
            tiny_run(make(), engine=Processes(2), out=tmp_path, callbacks=(StopAfter(2),))
        other = tiny_run(make(), out=tmp_path, resume=True)
        assert other.final.state_sha256 == whole.final.state_sha256
        assert other.final.personal == whole.final.personal
        assert [record.ratios for record in other.rounds] == [record.ratios for record in whole.rounds]
        assert [record.loss for record in other.rounds] == [record.loss for record in whole.rounds]

    def _run(self, method: Method, **options: Any) -> RunResult:
        return run(method, self.problem, tiny_clients(), tiny_config(), **options)

    largest_step: ClassVar[float] = 3.0
    """Largest allowed change of the global model in a round, in multiples of the largest change of a client.

    Raise it for methods with a server optimizer.
    """

    def test_equal_changes_move_the_model_by_about_one_of_them(self, make: Callable[[], Method]) -> None:
        first = tiny_clients(1)[0]
        clients = [dataclasses.replace(first, id=id) for id in range(8)]
        round = _Round(
            make(), self.problem, clients=clients, config=dataclasses.replace(tiny_config(), cohort=8, capability_levels=None)
        )
        before = {name: round.ctx.state[name].clone() for name in round.ctx.parameters}
        round.finish()
        moved = max(float((round.server.state.model[name] - one).norm()) for name, one in before.items())
        most = max(float(one.delta[name].norm()) for one in round.updates for name in before)
        assert moved <= self.largest_step * most, "the model moves further than any client did: is it a sum of changes?"

    def test_states_are_read_only_and_training_reads_no_test_data(self, make: Callable[[], Method]) -> None:
        poisoned = []
        for client in tiny_clients():
            test = _Poisoned(client.data.test.inputs, client.data.test.targets)
            poisoned.append(dataclasses.replace(client, data=ClientData(client.data.train, client.data.val, test)))
        for deploy in get_args(Deploy):
            round = _Round(make(), self.problem, clients=poisoned, config=dataclasses.replace(tiny_config(), deploy=deploy))
            state = {**round.ctx.state}
            before = {name: (tensor._version, tensor.clone()) for name, tensor in state.items()}
            round.finish()
            for name, tensor in state.items():
                assert tensor._version == before[name][0], f"{name!r} of server.state or task.state was changed in place"

    def test_other_networks(self, make: Callable[[], Method]) -> None:
        for network in ("plain", "group norm", "tied", "adapters"):
            problem = Problem(model=partial(OtherNet, network), example_inputs=(torch.zeros(2, 6),))
            try:
                RunSpec.build(make(), problem, tiny_config())
            except SparsekitError:
                continue  # the method refuses this network
            result = run(make(), problem, tiny_clients(), tiny_config(rounds=2))
            assert all(not record.dropped for record in result.rounds)

    def test_a_client_that_fails_or_lies_costs_its_own_update_alone(self, make: Callable[[], Method]) -> None:
        for what in ("fails", "no metrics", "no tensors", "extreme metrics"):
            self._survives(make(), what)

    def _survives(self, method: Method, what: str) -> None:
        def spoilt(reply: Reply) -> Reply:
            if what == "fails" or reply.update is None:
                return Reply(client_id=reply.client_id, error="planted", traceback="planted")
            extreme = dict.fromkeys(reply.update.metrics, 1e30)
            lies: dict[str, Any] = {
                "no metrics": {"metrics": {}},
                "no tensors": {"extra": {}},
                "extreme metrics": {"metrics": extreme},
            }
            return dataclasses.replace(reply, update=dataclasses.replace(reply.update, **lies[what]))

        config = dataclasses.replace(tiny_config(), min_replies=1)
        server = None
        for _ in range(3):
            round = _Round(method, self.problem, config=config, server=server)
            round.finish(spoilt)
            server = round.server
        assert server is not None
        assert all(bool(torch.isfinite(one).all()) for one in server.state.model.values() if one.is_floating_point())

    def test_a_round_among_a_thousand_clients_reads_and_writes_the_memories_of_its_own(
        self, make: Callable[[], Method]
    ) -> None:
        split = tiny_clients(1)[0].data
        round = _Round(make(), self.problem, clients=[Client(id=id, data=split) for id in range(1000)])
        round.finish()
        touched = set(round.ctx.client) - {request.client_id for request in round.requests}
        assert not touched, "server.client[id] is for clients of the round alone"


class _Round:
    """One round of a method, step by step, in this process."""

    def __init__(
        self,
        method: Method,
        problem: Problem,
        *,
        clients: Sequence[Client] = (),
        config: RunConfig | None = None,
        server: Server | None = None,
    ) -> None:
        spec = RunSpec.build(method, problem, config or tiny_config()) if server is None else server.spec
        self.server = server or Server(spec, by_id(clients or tiny_clients()))
        self.ctx = self.server.context(self.server.state.round + 1)
        self.requests = self.server.requests(self.ctx)
        self.updates: list[Update] = []

    def finish(self, spoilt: Callable[[Reply], Reply] = lambda reply: reply) -> None:
        """Train the clients and aggregate. `spoilt` modifies the reply of the first client, which may then be refused."""
        spec, replies = self.server.spec, []
        with tempfile.TemporaryDirectory() as folder:
            memories = Memories(Path(folder), durable=False)
            for place, request in enumerate(self.requests):
                reply = answer(
                    spec, self.server.clients[request.client_id], dataclasses.replace(request, memory_round=None), memories
                )
                assert not reply.error, reply.error
                replies.append(self.server.priced(request, reply if place else spoilt(reply)))
        for request, reply in zip(self.requests, replies, strict=True):
            try:
                self.updates.append(self.server.validate(self.ctx, request, reply))
            except (ClientError, UpdateError):
                assert reply is replies[0]
        self.server.aggregate(self.ctx, self.updates, replies)


class _Poisoned(TensorData):
    """Test data that raise an error when they are read."""

    def batch(self, positions: Any = None) -> Any:
        raise AssertionError("training reads test data")

    def labels(self) -> Tensor:
        raise AssertionError("training reads test data")


class OtherNet(nn.Module):
    """Six inputs, two hidden layers, three classes. `kind`: "plain", "group norm", "tied" (layer used twice) or "adapters"."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.outer, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm = nn.GroupNorm(2, 8) if kind == "group norm" else nn.Identity()
        if kind == "tied":
            self.again = self.outer
        if kind == "adapters":
            self.lora_A, self.lora_B = nn.Linear(6, 4, bias=False), nn.Linear(4, 8, bias=False)
            self.inner.requires_grad_(False)
        self.kind = kind

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.inner(inputs) + (self.lora_B(self.lora_A(inputs)) if self.kind == "adapters" else 0.0)
        hidden = torch.relu(self.norm(hidden))
        hidden = torch.relu(self.outer(hidden))
        logits: Tensor = self.out(torch.relu(self.again(hidden)) if self.kind == "tied" else hidden)
        return logits
