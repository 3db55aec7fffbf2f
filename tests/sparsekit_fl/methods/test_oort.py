"""Oort: the contract, its scores to the digit, and fairness among equals."""

import math
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from personal import STATE, client_context, deep_problem, server_context, training

import sparsekit_fl as fl
from sparsekit_fl.methods.sampling import Oort
from sparsekit_fl.methods.server import ClientInfo
from sparsekit_fl.testing import tiny_config

oort = sys.modules[Oort.__module__]


def context(round: int, memory: dict, *, clients: int = 30, size: int = 6, speed=lambda _: 1e9) -> fl.ServerContext:
    roster = {k: ClientInfo(examples=100, capability=fl.Capability(flops_per_second=speed(k))) for k in range(clients)}
    return server_context(round=round, rounds=1000, roster=roster, cohort=size, memory=memory, rng=[7, round])


NOTHING = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}


def answer(client_id: int, *, loss: float = 1.0, seconds: float = 1.0) -> fl.Update:
    metrics = {"mean_squared_loss": loss**2}
    return fl.Update(
        round=1, client_id=client_id, examples=100, delta=NOTHING, metrics=metrics, cost=fl.WorkCost(seconds=seconds)
    )


def played(rounds: int, method: Oort, *, loss=lambda _: 1.0, seconds=lambda _: 1.0, **options):
    memory, counts = {}, np.zeros(options.get("clients", 30), dtype=int)
    for round in range(1, rounds + 1):
        ctx = context(round, memory, **options)
        cohort = method.sample(ctx)
        assert len(set(cohort)) == ctx.cohort_size
        method.aggregate(ctx, [answer(k, loss=loss(k), seconds=seconds(k)) for k in cohort])
        counts[cohort] += 1
    return memory, counts


def test_equal_losses_and_times_are_chosen_equally_often_in_the_limit() -> None:
    _, counts = played(1500, Oort())
    # 300 each; uniform sampling has a standard deviation of about 15.
    assert counts.min() > 240
    assert counts.max() < 360


def test_clients_of_high_loss_are_chosen_more_often() -> None:
    _, counts = played(200, Oort(), loss=lambda k: 3.0 if k < 6 else 0.5)
    assert counts[:6].mean() > 1.5 * counts[6:].mean()


def test_scores_are_those_of_the_paper() -> None:
    tried = {
        "0": {"utility": 10.0, "seconds": 1.0, "pace": 1.0, "round": 2},
        "1": {"utility": 20.0, "seconds": 4.0, "pace": 1.0, "round": 1},
        "2": {"utility": 15.0, "seconds": 1.0, "pace": 1.0, "round": 4},
    }
    found = oort._scores(5, tried, preferred=2.0)
    low = 10.0 * 0.999

    def score(utility: float, last: int) -> float:
        return (utility - low) / (20.0 - low) + math.sqrt(0.1 * math.log(5) / last)

    assert found[0] == pytest.approx(score(10.0, 2))
    assert found[1] == pytest.approx(score(20.0, 1) * (2.0 / 4.0) ** 2)
    assert found[2] == pytest.approx(score(15.0, 4))


def test_the_pacer_relaxes_the_preferred_time_once_utility_stands_still(monkeypatch) -> None:
    monkeypatch.setattr(oort, "_PACE_ROUNDS", 10)
    memory, _ = played(41, Oort())
    # In the first window hardly anybody is exploited yet; after rounds 30 and 40 nothing has changed.
    assert memory["percentile"] == 30 + 2 * 5


def test_exploration_decays_to_its_least_value(monkeypatch) -> None:
    memory: dict = {}
    monkeypatch.setattr(oort, "_DECAY", 0.5)
    method = Oort(exploration=0.9)
    shares = []
    for round in range(1, 5):
        ctx = context(round, memory, clients=200)
        method.aggregate(ctx, [answer(k) for k in method.sample(ctx)])
        shares.append(memory["exploration"])
    assert shares == pytest.approx([0.45, 0.225, 0.2, 0.2])


def test_the_statistical_utility_uses_single_examples_of_the_first_epoch() -> None:
    spec, client, ctx = client_context(Oort(), deep_problem(), training(tiny_config(), local_epochs=2, batch_size=64))
    result = spec.method.train(ctx, fl.Task(state=spec.initial))
    model = spec.problem.model()
    model.load_state_dict(spec.initial)
    data = client.data.train
    single = F.cross_entropy(model(data.inputs[0]), data.targets, reduction="none")
    assert result.metrics["mean_squared_loss"] == pytest.approx(float(single.square().mean()), rel=1e-5)
