"""A tiny problem, and tests for methods: inherit `MethodContract` in a test file, and pytest runs them."""

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsekit_fl.callbacks import Callback, RunView
from sparsekit_fl.config import RunConfig, TrainingConfig
from sparsekit_fl.engines import Processes
from sparsekit_fl.errors import RunInterrupted
from sparsekit_fl.methods.base import Method
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
        logits: Tensor = self.last(torch.relu(self.norm(self.first(inputs))))
        return logits


def tiny_problem() -> Problem:
    """Return the problem of classifying points by a linear rule."""
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
    """Return `tiny_problem` and the requested ones of `tiny_clients`, as the command line or a Flower app loads them."""
    return tiny_problem(), [client for client in tiny_clients() if ids is None or client.id in ids]


class StopAfter(Callback):
    """Raise KeyboardInterrupt, as Ctrl-C does, when a round is saved."""

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
    """

    def test_workers_and_interruptions_change_no_bit(self, make: Callable[[], Method], tmp_path: Path) -> None:
        import pytest  # here, since processes that load `tiny_data` need none

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
