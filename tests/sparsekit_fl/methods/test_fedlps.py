"""FedLPS: the contract, the oracles of learned patterns and of the bandit, and reductions to FedAvg."""

from __future__ import annotations

import dataclasses
import math

import pytest
from personal import server_context

import sparsekit_fl as fl
from sparsekit_fl.methods.fedlps import fedlps
from sparsekit_fl.policies import Constant, Full, LearnableSgd
from sparsekit_fl.policies.context import ClientInfo
from sparsekit_fl.policies.ratio import BanditRatio, utility
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem


def test_only_kept_entries_travel() -> None:
    full = fl.run(dataclasses.replace(fedlps(), ratio=Full()), tiny_problem(), tiny_clients(), tiny_config(rounds=1))
    half = fl.run(dataclasses.replace(fedlps(), ratio=Constant(0.5)), tiny_problem(), tiny_clients(), tiny_config(rounds=1))
    assert half.cost.uplink_bytes < full.cost.uplink_bytes
    assert half.cost.flops_compact < half.cost.flops_rowmask


def server(round: int, capability: float, memory: dict) -> fl.ServerContext:
    roster = {7: ClientInfo(examples=10, capability=fl.Capability(ratio=capability))}
    return server_context(round=round, rounds=100, roster=roster, cohort=10, rng=[0, round], kind="ratio", memory=memory)


def answer(ratio: float, accuracy: float, **metrics: float) -> fl.Update:
    return fl.Update(
        round=1, client_id=7, examples=10, delta={}, ratio=ratio,
        metrics={"accuracy": accuracy, **metrics}, cost=fl.WorkCost(seconds=2.0),
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
            policy.observe(ctx, [answer(proposal, 0.5 + 0.001 * round, initial_accuracy=0.1)])


def test_the_reward_is_utility_gained_per_second() -> None:
    policy, memory = BanditRatio(), {}
    ctx = server(1, 1.0, memory)
    first = policy.propose(ctx, 7)
    policy.observe(ctx, [answer(first, 0.6, initial_accuracy=0.1)])
    bandit = policy._bandit(ctx, memory["7"], seed=0)
    assert [arm.mean for arm in bandit.arms if arm.pulls] == pytest.approx([(utility(0.6) - utility(0.1)) / 2.0] * 2)
    second = policy.propose(ctx, 7)
    policy.observe(ctx, [answer(second, 0.5)])
    dropped = policy._bandit(ctx, memory["7"], seed=0)
    assert not any(arm.low < second <= arm.high and arm.high == second for arm in dropped.arms)
    assert memory["7"]["accuracy"] == 0.5


def test_a_proposal_that_was_never_answered_is_made_again() -> None:
    policy, memory = BanditRatio(), {}
    first = policy.propose(server(1, 1.0, memory), 7)
    assert policy.propose(server(2, 1.0, memory), 7) == first


def test_passes_multiply_the_local_epochs_and_round_halves_up() -> None:
    def flops(epochs_factor: float, epochs: int) -> int:
        config = tiny_config(rounds=1)
        config = dataclasses.replace(config, training=dataclasses.replace(config.training, local_epochs=epochs))
        method = dataclasses.replace(fedlps(), ratio=Constant(0.5), local=LearnableSgd(epochs_factor=epochs_factor))
        return fl.run(method, tiny_problem(), tiny_clients(), config).cost.flops_compact_training

    one = flops(1.0, 1)
    assert [flops(factor, 2) for factor in (0.1, 1.0, 1.25, 1.4)] == [one, 2 * one, 3 * one, 3 * one]


def test_utility_is_the_papers_function() -> None:
    for x in (0.0, 0.3, 1.0, 15.0):
        assert utility(x) == pytest.approx(10 - 20 / (1 + math.exp(0.35 * x)))
