"""FedLPS: the contract, the oracles of learned patterns and of the bandit, and reductions to FedAvg."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsekit import trace_units
from sparsekit.errors import InvalidValueError, NoUnitsError
from sparsekit.training.regularizer import ImportanceRegularizer
from sparsekit_fl.context.server import ClientInfo, ServerContext
from sparsekit_fl.methods import fedavg
from sparsekit_fl.methods.fedlps import fedlps, fedlps_own, fedlps_paper
from sparsekit_fl.options.config import RunConfig, TrainingConfig
from sparsekit_fl.policies.aggregate import DeltaMean
from sparsekit_fl.policies.bandit import BanditRatio, utility
from sparsekit_fl.policies.learnable import LearnableSgd
from sparsekit_fl.policies.personal import GlobalModel
from sparsekit_fl.policies.ratio import Constant, Full
from sparsekit_fl.policies.share import Everything
from sparsekit_fl.problem.clients import Capability, Client, ClientData
from sparsekit_fl.problem.data import TensorData
from sparsekit_fl.problem.metrics import accuracy, log_loss
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing.methods import MethodContract
from sparsekit_fl.testing.tiny import tiny_clients, tiny_config, tiny_problem
from sparsekit_fl.wire.messages import Update, WorkCost


class TestFedLps(MethodContract):
    @pytest.fixture
    def make(self):
        return fedlps


class TestFedLpsOwn(MethodContract):
    @pytest.fixture
    def make(self):
        return fedlps_own


class TestFedLpsPaper(MethodContract):
    @pytest.fixture
    def make(self):
        return fedlps_paper


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_whole_model_without_its_terms_is_fedavg_bit_for_bit(momentum) -> None:
    training = dataclasses.replace(tiny_config(rounds=3).training, momentum=momentum)
    config = dataclasses.replace(tiny_config(rounds=3), training=training)
    plain = dataclasses.replace(
        fedlps(),
        ratio=Full(),
        share=Everything(),
        aggregate=DeltaMean(),
        personal=GlobalModel(),
        local=LearnableSgd(proximal=0.0, term=ImportanceRegularizer(strength=0.0)),
    )
    ours = run(plain, tiny_problem(), tiny_clients(), config)
    reference = run(fedavg(), tiny_problem(), tiny_clients(), config)
    assert ours.final.state_sha256 == reference.final.state_sha256
    assert ours.cost.flops_compact_training == reference.cost.flops_compact_training


def test_the_proximal_shortcut_equals_the_added_gradient() -> None:
    """Without momentum the pull is an interpolation in place; weight decay of almost nothing takes the other way."""
    results = []
    for decay in (0.0, 1e-30):
        training = dataclasses.replace(tiny_config(rounds=2).training, weight_decay=decay)
        method = dataclasses.replace(
            fedlps(), ratio=Constant(0.5), local=LearnableSgd(proximal=0.3, proximal_reduction="sum", importance_lr=0.1)
        )
        config = dataclasses.replace(tiny_config(rounds=2), training=training)
        results.append(run(method, tiny_problem(), tiny_clients(), config).state)
    for name, value in results[0].items():
        assert torch.allclose(value.double(), results[1][name].double(), atol=1e-5), name


class OneUseful(nn.Module):
    """Eight hidden units of which only 2 and 5 see what tells the classes apart; the others see noise."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 2, bias=False)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(8)).requires_grad_(False)
            self.second.weight.copy_(0.3 * torch.tensor([[1.0, -1.0] * 4, [-1.0, 1.0] * 4]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def test_over_a_round_the_learned_pattern_becomes_the_units_that_serve() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (400,), generator=generator)
    x = torch.rand(400, 8, generator=generator)
    x[:, 2], x[:, 5] = (y == 0).float() * 3, (y == 1).float() * 3
    data = TensorData((x,), y)
    client = Client(id=0, data=ClientData(train=data, val=data, test=data))
    problem = Problem(
        model=OneUseful, example_inputs=(torch.zeros(1, 8),), loss=F.cross_entropy, metrics={"accuracy": accuracy}
    )
    config = RunConfig(rounds=1, cohort=1, training=TrainingConfig(local_epochs=20, batch_size=20, lr=0.1))
    method = dataclasses.replace(fedlps(), ratio=Constant(0.25))
    masks = {}

    class Spy(LearnableSgd):
        def train(self, ctx, start, mask, ratio):
            result = super().train(ctx, start, mask, ratio)
            masks.update(result.mask)
            return result

    run(dataclasses.replace(method, local=Spy(importance_lr=0.1, explore_every=10)), problem, [client], config)
    assert masks["first"].nonzero().flatten().tolist() == [2, 5]


def test_exploring_is_counted_as_dense_work() -> None:
    costs = [
        run(
            dataclasses.replace(fedlps(), ratio=Constant(0.25), local=LearnableSgd(explore_every=every)),
            tiny_problem(),
            tiny_clients(),
            tiny_config(rounds=1),
        ).cost.flops_compact_training
        for every in (0, 2, 1)
    ]
    assert costs[0] < costs[1] < costs[2]


def test_only_kept_entries_travel() -> None:
    full = run(dataclasses.replace(fedlps(), ratio=Full()), tiny_problem(), tiny_clients(), tiny_config(rounds=1))
    half = run(dataclasses.replace(fedlps(), ratio=Constant(0.5)), tiny_problem(), tiny_clients(), tiny_config(rounds=1))
    assert half.cost.uplink_bytes < full.cost.uplink_bytes
    assert half.cost.flops_compact < half.cost.flops_rowmask


def server(round: int, capability: float, memory: dict, *, seed: int = 0) -> ServerContext:
    graph = trace_units(tiny_problem().model(), *tiny_problem().example_inputs)
    return ServerContext(
        round=round,
        rounds=100,
        roster={7: ClientInfo(examples=10, capability=Capability(ratio=capability))},
        cohort=10,
        rngs={"ratio": np.random.default_rng([seed, round])},
        kind="ratio",
        memory=memory,
        graph=graph,
        state={},
    )


def answer(ratio: float, accuracy: float, **metrics: float) -> Update:
    return Update(
        round=1, client_id=7, examples=10, delta={}, ratio=ratio,
        metrics={"accuracy": accuracy, **metrics}, cost=WorkCost(seconds=2.0),
    )  # fmt: skip


def test_proposals_never_exceed_the_capability_of_the_round() -> None:
    policy, memory = BanditRatio(), {}
    for round in range(1, 60):
        level = (1.0, 0.5, 0.25, 0.125, 0.0625)[round % 5]
        ctx = server(round, level, memory)
        proposal = policy.propose(ctx, 7)
        assert proposal is not None
        assert 1 / 16 <= proposal <= max(level, 1 / 16)
        if round % 3:
            policy.observe(ctx, answer(proposal, 0.5 + 0.001 * round, initial_accuracy=0.1))


def test_the_reward_is_utility_gained_per_second() -> None:
    policy, memory = BanditRatio(), {}
    ctx = server(1, 1.0, memory)
    first = policy.propose(ctx, 7)
    policy.observe(ctx, answer(first, 0.6, initial_accuracy=0.1))
    bandit = policy._bandit(ctx, memory["7"], seed=0)
    assert [arm.mean for arm in bandit.arms if arm.pulls] == pytest.approx([(utility(0.6) - utility(0.1)) / 2.0] * 2)
    second = policy.propose(ctx, 7)
    policy.observe(ctx, answer(second, 0.5))
    dropped = policy._bandit(ctx, memory["7"], seed=0)
    assert not any(arm.low < second <= arm.high and arm.high == second for arm in dropped.arms)
    assert memory["7"]["accuracy"] == 0.5


def test_a_proposal_that_was_never_answered_is_made_again() -> None:
    policy, memory = BanditRatio(), {}
    first = policy.propose(server(1, 1.0, memory), 7)
    assert policy.propose(server(2, 1.0, memory), 7) == first


def test_bandit_memory_is_plain_json() -> None:
    import json

    policy, memory = BanditRatio(), {}
    ctx = server(1, 1.0, memory)
    policy.observe(ctx, answer(policy.propose(ctx, 7), 0.6))
    assert json.loads(json.dumps(memory)) == memory


def test_a_capability_below_the_arms_is_executed_as_it_is() -> None:
    policy, memory = BanditRatio(low=0.25), {}
    ctx = server(1, 0.125, memory)
    assert policy.propose(ctx, 7) == 0.125
    policy.observe(ctx, answer(0.125, 0.6))
    assert memory["7"]["accuracy"] == 0.6


def test_the_arms_end_at_the_largest_ratio() -> None:
    policy, memory = BanditRatio(high=0.25), {}
    for round in range(1, 40):
        ctx = server(round, (1.0, 0.5, 0.125)[round % 3], memory)
        proposal = policy.propose(ctx, 7)
        assert 1 / 16 <= proposal <= (0.125 if round % 3 == 2 else 0.25)
        policy.observe(ctx, answer(proposal, 0.5 + 0.001 * round, initial_accuracy=0.1))
    bandit = policy._bandit(server(40, 1.0, memory), memory["7"], seed=0)
    assert max(arm.high for arm in bandit.arms) == 0.25
    with pytest.raises(InvalidValueError, match=r"high must be above low \(0.25\), got 0.2"):
        BanditRatio(low=0.25, high=0.2)


def test_passes_multiply_the_local_epochs_and_round_halves_up() -> None:
    def flops(passes: float, epochs: int) -> int:
        config = tiny_config(rounds=1)
        config = dataclasses.replace(config, training=dataclasses.replace(config.training, local_epochs=epochs))
        method = dataclasses.replace(fedlps(), ratio=Constant(0.5), local=LearnableSgd(passes=passes))
        return run(method, tiny_problem(), tiny_clients(), config).cost.flops_compact_training

    one = flops(1.0, 1)
    assert [flops(passes, 2) for passes in (0.1, 1.0, 1.25, 1.4)] == [one, 2 * one, 3 * one, 3 * one]


def test_the_paper_method_keeps_the_papers_choices() -> None:
    paper = fedlps_paper()
    assert (paper.ratio, paper.share, paper.aggregate) == (BanditRatio(), Everything(), DeltaMean())
    assert isinstance(paper.local, LearnableSgd)
    assert paper.local.passes == 1.0


def test_utility_is_the_papers_function() -> None:
    for x in (0.0, 0.3, 1.0, 15.0):
        assert utility(x) == pytest.approx(10 - 20 / (1 + math.exp(0.35 * x)))


def test_bad_options_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="low"):
        BanditRatio(low=1.0)
    for bad in ({"proximal": -1.0}, {"importance_lr": float("nan")}, {"noise": -1.0}, {"proximal_reduction": "max"}):
        with pytest.raises(InvalidValueError):
            LearnableSgd(**bad)


def test_a_problem_that_cannot_work_is_refused_before_the_run() -> None:
    blind = dataclasses.replace(tiny_problem(), metrics={"log_loss": log_loss})
    with pytest.raises(InvalidValueError, match="learns from training accuracy, and the problem has the metrics"):
        run(fedlps(), blind, tiny_clients(), tiny_config(rounds=1))
    flat = Problem(model=lambda: nn.Linear(6, 3), example_inputs=(torch.zeros(2, 6),))
    with pytest.raises(NoUnitsError, match="nothing to choose from"):
        run(fedlps(), flat, tiny_clients(), tiny_config(rounds=1))
