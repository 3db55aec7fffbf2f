"""FedMP: the contract, residual recovery, and what its bandits learn from."""

from __future__ import annotations

import pytest
from personal import server_context, watched

import sparsekit_fl as fl
from sparsekit_fl.methods import fedmp
from sparsekit_fl.methods.fedmp import TimelyRatio
from sparsekit_fl.policies.aggregate import Mean
from sparsekit_fl.policies.context import ClientInfo
from sparsekit_fl.testing import tiny_config


def context(round: int, memory: dict, *, capability: float = 1.0) -> fl.ServerContext:
    roster = {k: ClientInfo(examples=10, capability=fl.Capability(ratio=capability)) for k in range(2)}
    return server_context(round=round, rounds=100, roster=roster, rng=[5, round], kind="ratio", memory=memory)


def answer(client_id: int, loss: float, seconds: float) -> fl.Update:
    cost = fl.WorkCost(seconds=seconds)
    return fl.Update(round=1, client_id=client_id, examples=10, delta={}, metrics={"loss": loss}, cost=cost)


def rewards(policy: TimelyRatio, memory: dict, client_id: int) -> list[float]:
    return [reward for _, reward in policy._bandit(memory[str(client_id)], seed=0).told]


def test_the_reward_is_the_loss_decrease_over_the_gap_to_the_mean_time() -> None:
    policy, memory = TimelyRatio(), {}
    for round, losses in ((1, (2.0, 3.0)), (2, (1.5, 3.5))):
        ctx = context(round, memory)
        for client_id in range(2):
            policy.propose(ctx, client_id)
        policy.observe_all(ctx, [answer(0, losses[0], 1.0), answer(1, losses[1], 3.0)])
    # Times 1 and 3 have a mean of 2: both gaps are a half. A worse loss is a negative reward, slow or fast.
    assert rewards(policy, memory, 0) == pytest.approx([0.5 / 0.5])
    assert rewards(policy, memory, 1) == pytest.approx([-0.5 / 0.5])


def test_finishing_on_time_is_no_infinite_reward() -> None:
    policy, memory = TimelyRatio(floor=0.1), {}
    for round, loss in ((1, 2.0), (2, 1.0)):
        ctx = context(round, memory)
        policy.propose(ctx, 0)
        policy.observe_all(ctx, [answer(0, loss, 1.0)])
    assert rewards(policy, memory, 0) == pytest.approx([1.0 / 0.1])


def test_proposals_cover_the_arms_whatever_the_client_can_do_unless_capped() -> None:
    for capped in (False, True):
        policy, memory, seen = TimelyRatio(capped=capped), {}, []
        for round in range(1, 60):
            ctx = context(round, memory, capability=0.5)
            seen.append(policy.propose(ctx, 0))
            policy.observe_all(ctx, [answer(0, 1.0 / round, 1.0)])
        assert min(seen) >= 0.2
        assert max(seen) <= (0.5 if capped else 1.0)
        assert max(seen) > (0.45 if capped else 0.8)


def test_the_residual_comes_back_with_equal_weights() -> None:
    assert fedmp().aggregate == Mean("uniform", over="all")
    _, updates = watched(fedmp(), config=tiny_config(rounds=8))
    ratios = [update.ratio for update in updates]
    assert min(ratios) >= 0.2
    assert len(set(ratios)) > 10
