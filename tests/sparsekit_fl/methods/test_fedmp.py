"""FedMP: its bandit E-UCB, its ratios and their reward."""

import math
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from personal import STATE, server_context

import sparsekit_fl as fl
from sparsekit_fl.methods.server import ClientInfo
from sparsekit_fl.methods.submodels import EUCB, FedMP

fedmp = sys.modules[FedMP.__module__]


def context(round: int, memory: dict, *, capability: float = 1.0) -> fl.ServerContext:
    roster = {k: ClientInfo(examples=10, capability=fl.Capability(ratio=capability)) for k in range(2)}
    return server_context(round=round, rounds=100, roster=roster, rng=[5, round], memory=memory)


def answer(client_id: int, loss: float, seconds: float) -> fl.Update:
    cost = fl.WorkCost(seconds=seconds)
    delta = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    return fl.Update(round=1, client_id=client_id, examples=10, delta=delta, metrics={"loss": loss}, cost=cost)


def play(method: FedMP, memory: dict, round: int, *answers: fl.Update, **options: float) -> list[float]:
    """One round; returns the ratios."""
    ctx = context(round, memory, **options)
    ratios = [method.ratio_of(ctx, client_id) for client_id in range(len(answers))]
    method.aggregate(ctx, answers)
    return ratios


def rewards(memory: dict, client_id: int) -> list[float]:
    return memory[str(client_id)]["rewards"]


def test_the_reward_is_the_loss_decrease_over_the_gap_to_the_mean_time() -> None:
    method, memory = FedMP(), {}
    for round, losses in ((1, (2.0, 3.0)), (2, (1.5, 3.5))):
        play(method, memory, round, answer(0, losses[0], 1.0), answer(1, losses[1], 3.0))
    # Times 1 and 3 have a mean of 2: both gaps are a half. A worse loss is a negative reward, slow or fast.
    assert rewards(memory, 0) == pytest.approx([0.5 / 0.5])
    assert rewards(memory, 1) == pytest.approx([-0.5 / 0.5])


def test_finishing_on_time_is_no_infinite_reward() -> None:
    method, memory = FedMP(), {}
    for round, loss in ((1, 2.0), (2, 1.0)):
        play(method, memory, round, answer(0, loss, 1.0))
    assert rewards(memory, 0) == pytest.approx([1.0 / 0.1])


def test_proposals_cover_the_arms_whatever_the_client_can_do() -> None:
    method, memory, seen = FedMP(), {}, []
    for round in range(1, 60):
        seen += play(method, memory, round, answer(0, 1.0 / round, 1.0), capability=0.5)
    assert 0.2 <= min(seen) < 0.4
    assert 0.8 < max(seen) <= 1.0


def test_the_indices_of_a_trace_of_e_ucb(monkeypatch) -> None:
    monkeypatch.setattr(fedmp, "_DISCOUNT", 0.5)
    bandit = EUCB({}, 0.0001, seed=0)
    assert bandit.indices() == [math.inf]
    for value, reward in ((0.5, 1.0), (0.2, 0.5), (0.7, 0.25)):
        bandit.tell(value, reward)
    # The first splits [0, 1], the second [0, 0.5], the third [0.5, 1]; a reward stays in the part that begins at its ratio.
    weights, total = (0.25, 0.5, 1.0), math.log(1.75)
    found = bandit.indices()
    assert found[0] == math.inf
    for index, weight, reward in zip(found[1:], (weights[1], weights[0], weights[2]), (0.5, 1.0, 0.25), strict=True):
        assert index == pytest.approx(reward + math.sqrt(2 * total / weight))


@given(st.lists(st.tuples(st.floats(0.1, 1.0), st.floats(-5.0, 5.0)), max_size=30), st.integers(0, 9))
def test_every_reward_is_in_one_arm_and_the_arms_cover_the_ratios(steps: list[tuple[float, float]], seed: int) -> None:
    memory: dict = {}
    for value, reward in steps:
        bandit = EUCB(memory, 0.1, seed)
        drawn = bandit.draw()
        indices = bandit.indices()
        place = bandit._place(drawn)
        assert indices[place] == max(indices)
        assert 0.1 <= drawn <= 1.0
        bandit.tell(value, reward)
    edges = memory.get("edges", [0.1, 1.0])
    assert (edges[0], edges[-1]) == (0.1, 1.0)
    assert all(high - low >= 0.05 * 0.9 - 1e-12 for low, high in pairwise(edges))
    assert len(memory.get("rewards", [])) == len(steps)
