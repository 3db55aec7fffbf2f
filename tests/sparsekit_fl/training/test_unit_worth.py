"""Clients learn their masks in units of loss: what serves is found, work is counted, devices are not overrun."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsekit import trace_units
from sparsekit.errors import InvalidValueError
from sparsekit.training.loss_importance import LossImportance
from sparsekit_fl.methods.fedlps import fedlps
from sparsekit_fl.options.config import RunConfig, TrainingConfig
from sparsekit_fl.policies.learnable import LearnableSgd
from sparsekit_fl.policies.ratio import Constant
from sparsekit_fl.problem.clients import Capability, Client, ClientData
from sparsekit_fl.problem.data import TensorData
from sparsekit_fl.problem.metrics import accuracy
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing.methods import MethodContract
from sparsekit_fl.testing.tiny import tiny_clients, tiny_config, tiny_problem
from sparsekit_fl.training.unit_worth import first_mask

EAGER = LossImportance(explore=1.0, samples=3, rounds=4)


def by_loss(learning: LossImportance = EAGER, ratio: float = 0.5, **options):
    return dataclasses.replace(fedlps(), ratio=Constant(ratio), local=LearnableSgd(learning=learning, **options))


class TestByLoss(MethodContract):
    @pytest.fixture
    def make(self):
        return by_loss


class Planted(nn.Module):
    """Eight hidden units with weights of one size, of which only 2 and 5 see what tells the classes apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 2, bias=False)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(8)).requires_grad_(False)
            self.second.weight.copy_(0.3 * torch.tensor([[1.0, -1.0] * 4, [-1.0, 1.0] * 4]))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def planted_run(*, rounds: int = 4, capability: float = 1.0, learning: LossImportance | None = EAGER, **training):
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (400,), generator=generator)
    x = torch.rand(400, 8, generator=generator)
    x[:, 2], x[:, 5] = (y == 0).float() * 3, (y == 1).float() * 3
    data = TensorData((x,), y)
    client = Client(id=0, data=ClientData(train=data, val=data, test=data), capability=Capability(ratio=capability))
    problem = Problem(model=Planted, example_inputs=(torch.zeros(1, 8),), loss=F.cross_entropy, metrics={"accuracy": accuracy})
    config = RunConfig(
        rounds=rounds, cohort=1, training=TrainingConfig(local_epochs=2, batch_size=20, lr=0.1, **training), capability="fixed"
    )
    masks, memories = [], []

    class Spy(LearnableSgd):
        def train(self, ctx, start, mask, ratio):
            result = super().train(ctx, start, mask, ratio)
            masks.append(result.mask["first"].nonzero().flatten().tolist())
            memories.append(ctx.memory)
            return result

    method = dataclasses.replace(fedlps(), ratio=Constant(0.25), local=Spy(learning=learning))
    return run(method, problem, [client], config), masks, memories[-1]


def test_the_units_that_serve_are_found_over_the_rounds_and_the_mask_settles() -> None:
    _, masks, memory = planted_run(rounds=6)
    assert masks[-1] == [2, 5]
    assert bool(memory["measured"].all())
    assert int(memory["rule"]["clock"][1]) == EAGER.rounds


def test_the_same_is_found_with_momentum_clipping_and_decay() -> None:
    _, masks, _ = planted_run(rounds=6, momentum=0.5, clip=1.0, weight_decay=1e-4)
    assert masks[-1] == [2, 5]


def test_exploration_is_counted_as_work() -> None:
    def flops(explore: float) -> int:
        return planted_run(rounds=2, learning=LossImportance(explore=explore, rounds=100))[0].cost.flops_compact

    still, tenth, most = flops(0.0), flops(0.1), flops(1.0)
    assert still < tenth <= 1.1 * still
    assert 1.5 * still < most <= 2.0 * still


def test_a_client_explores_no_more_than_its_device_can_run() -> None:
    """An exploring pass at 1/4 has all eight units: a device that can run half of them does not explore."""
    idle = planted_run(rounds=2, learning=LossImportance(explore=0.0))[0].cost.flops_compact
    weak, _, memory = planted_run(rounds=2, capability=0.5)
    assert weak.cost.flops_compact == idle
    assert not bool(memory["measured"].any())
    assert planted_run(rounds=2, capability=1.0)[0].cost.flops_compact > idle


def test_units_that_were_never_measured_rank_by_what_the_server_sent() -> None:
    graph = trace_units(Planted(), torch.zeros(1, 8))
    targets = torch.tensor([0.1, 0.9, 0.2, 0.8, 0.3, 0.7, 0.4, 0.6])
    assert first_mask(graph, targets, 0.25, {})["first"].nonzero().flatten().tolist() == [1, 3]
    memory = {
        "worth": torch.tensor([0.0, 0.0, 1e-3, 0.0, -1e-3, 2e-3, 0.0, 0.0]),
        "measured": torch.tensor([False, False, True, False, True, True, False, False]),
        "mask": {"first": torch.tensor([False, False, True, False, True, False, False, False])},
    }
    # Measured and kept first, though 5 is worth more; then 5, then the others by their targets.
    for ratio, kept in ((0.25, [2, 4]), (0.375, [2, 4, 5]), (0.5, [1, 2, 4, 5])):
        assert first_mask(graph, targets, ratio, memory)["first"].nonzero().flatten().tolist() == kept


def test_learning_that_needs_the_number_of_steps_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"learning\.steps must be None, got 100"):
        run(by_loss(LossImportance(steps=100)), tiny_problem(), tiny_clients(), tiny_config(rounds=1))
