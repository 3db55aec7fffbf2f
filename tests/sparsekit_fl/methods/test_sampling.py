"""Oort: its scores, fairness among equals. REFL: late updates on the simulated clock, their weights, who is asked."""

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch.nn.functional as F
from personal import client_context, deep_problem, server_context, tiny_clients, tiny_config, tiny_run, training, update

import sparsekit_fl as fl
from sparsekit_fl.methods.base import ClientInfo
from sparsekit_fl.methods.sampling import REFL, Oort, _packed

sampling = sys.modules[Oort.__module__]


def crowd(round, memory, *, clients=30):
    roster = dict.fromkeys(range(clients), ClientInfo(examples=100, capability=fl.Capability(flops_per_second=1e9)))
    return server_context(round=round, rounds=1000, roster=roster, cohort=6, memory=memory, rng=[7, round])


def answer(client_id):
    cost = fl.Cost(simulated_seconds=1.0)
    return update(client_id, [0.0] * 3, examples=100, metrics={"mean_squared_loss": 1.0}, cost=cost)


def played(rounds):
    memory, counts = {}, np.zeros(30, dtype=int)
    for round in range(1, rounds + 1):
        ctx = crowd(round, memory)
        cohort = Oort().sample(ctx)
        assert len(set(cohort)) == 6
        Oort().aggregate(ctx, [answer(k) for k in cohort])
        counts[cohort] += 1
    return memory, counts


def test_equal_losses_and_times_are_chosen_equally_often_in_the_limit():
    _, counts = played(1500)
    # 300 each; uniform sampling has a standard deviation of about 15.
    assert counts.min() > 240
    assert counts.max() < 360


def test_scores_are_those_of_the_paper():
    tried = {
        "0": {"utility": 10.0, "seconds": 1.0, "pace": 1.0, "round": 2},
        "1": {"utility": 20.0, "seconds": 4.0, "pace": 1.0, "round": 1},
        "2": {"utility": 15.0, "seconds": 1.0, "pace": 1.0, "round": 4},
    }
    found = sampling._scores(5, tried, preferred=2.0)
    low = 10.0 * 0.999

    def score(utility, last):
        return (utility - low) / (20.0 - low) + math.sqrt(0.1 * math.log(5) / last)

    assert found[0] == pytest.approx(score(10.0, 2))
    assert found[1] == pytest.approx(score(20.0, 1) * (2.0 / 4.0) ** 2)
    assert found[2] == pytest.approx(score(15.0, 4))


def test_the_pacer_relaxes_the_preferred_time_once_utility_stands_still(monkeypatch):
    monkeypatch.setattr(sampling, "_PACE_ROUNDS", 10)
    memory, _ = played(41)
    # In the first window hardly anybody is exploited yet; after rounds 30 and 40 nothing has changed.
    assert memory["percentile"] == 30 + 2 * 5


def test_exploration_decays_to_its_least_value(monkeypatch):
    memory: dict = {}
    monkeypatch.setattr(sampling, "_DECAY", 0.5)
    shares = []
    for round in range(1, 5):
        ctx = crowd(round, memory, clients=200)
        Oort().aggregate(ctx, [answer(k) for k in Oort().sample(ctx)])
        shares.append(memory["exploration"])
    assert shares == pytest.approx([0.45, 0.225, 0.2, 0.2])


def test_the_statistical_utility_uses_single_examples_of_the_first_epoch():
    spec, client, ctx = client_context(Oort(), deep_problem(), training(tiny_config(), local_epochs=2, batch_size=64))
    result = spec.method.train(ctx, fl.Task(state=spec.initial))
    model = spec.problem.model()
    model.load_state_dict(spec.initial)
    data = client.data.train
    single = F.cross_entropy(model(data.inputs[0]), data.targets, reduction="none")
    assert result.metrics["mean_squared_loss"] == pytest.approx(float(single.square().mean()), rel=1e-5)


@pytest.fixture
def everybody(monkeypatch):
    """All clients are there, and are expected to stay."""
    monkeypatch.setattr(REFL, "_presence", lambda self, server, ids: (ids >= 0, ids >= 0))


@pytest.mark.usefixtures("everybody")
def test_not_waiting_for_the_slowest_shortens_the_rounds():
    # Devices on which computing, not sending, takes the time.
    clients = [replace(client, capability=fl.Capability(flops_per_second=1e6)) for client in tiny_clients()]
    slow, fast = (tiny_run(f"refl target={target} cool_down=0", clients=clients, rounds=8) for target in (1.0, 0.5))
    assert fast.cost.seconds < 0.8 * slow.cost.seconds
    assert fast.cost.seconds == pytest.approx(sum(record.seconds for record in fast.rounds))


def context(round, memory):
    return server_context(round=round, clients=10, cohort=4, rng=[3, round], memory=memory)


def timed(client_id, value, *, seconds=1.0, round=1):
    return update(client_id, value, round=round, cost=fl.Cost(simulated_seconds=seconds))


def ids(arrived):
    return tuple([item.client_id for item in part] for part in arrived[:2])


@pytest.mark.usefixtures("everybody")
def test_late_updates_arrive_in_the_round_in_which_they_are_ready():
    method, memory = REFL(target=0.5, cool_down=0), {}
    first = context(1, memory)
    method.sample(first)
    answers = [timed(k, [1.0 + k // 3] * 3, seconds=seconds) for k, seconds in enumerate((1.0, 2.0, 3.5, 9.0))]
    arrived = method._arrivals(first, answers)
    assert ids(arrived) == ([0, 1], [])
    assert arrived[2] == 2.0
    # Clock 2 to 4: client 2 is ready at 3.5, client 3 not before 9.
    second = context(2, memory)
    assert not {2, 3} & set(method.sample(second))
    assert ids(method._arrivals(second, [timed(4, [1.0] * 3, seconds=2.0, round=2)])) == ([4], [2])
    for round in range(3, 6):
        later = context(round, memory)
        method.sample(later)
        arrived = method._arrivals(later, [timed(5, [1.0] * 3, seconds=2.0, round=round)])
    assert ids(arrived) == ([5], [3])
    assert (arrived[1][0].round, arrived[1][0].delta["w"].tolist()) == (1, [[2.0] * 3])
    assert memory["late"] == []


@pytest.mark.usefixtures("everybody")
def test_the_average_round_is_a_moving_one():
    method, memory = REFL(target=1.0, cool_down=0), {}
    for round, seconds in ((1, 4.0), (2, 8.0)):
        ctx = context(round, memory)
        method.sample(ctx)
        method._arrivals(ctx, [timed(0, [1.0] * 3, seconds=seconds, round=round)])
    assert memory["window"] == pytest.approx(0.25 * 4.0 + 0.75 * 8.0)


def test_those_who_are_expected_to_leave_are_asked_first(monkeypatch):
    monkeypatch.setattr(REFL, "_presence", lambda self, server, ids: (ids < 8, ids < 5))
    method = REFL(cool_down=2)
    memory: dict = {}
    assert set(method.sample(context(1, memory))) > {5, 6, 7}
    assert not {8, 9} & set(method.sample(context(2, memory)))


@pytest.mark.usefixtures("everybody")
def test_who_has_just_been_asked_rests_while_others_can_be_asked():
    method, memory = REFL(cool_down=2), {}
    first, second = method.sample(context(1, memory)), method.sample(context(2, memory))
    assert not set(first) & set(second)
    assert len(method.sample(context(3, memory))) == 4


def test_clients_stay_as_they_are_with_their_own_probability(monkeypatch):
    monkeypatch.setattr(sampling, "_STAYS", (0.7, 0.9))
    memory, changes, right, before = {}, np.zeros(200), 0.0, None
    method, ctx = REFL(), context(1, memory)
    for _ in range(300):
        now, expected = method._presence(ctx, np.arange(200))
        changes += 0 if before is None else np.array(now) != before
        before = np.array(now)
        right += np.mean(np.array(expected) == memory["next"].numpy())
    stays = 1 - changes / 299
    assert np.corrcoef(stays, memory["stay"].numpy())[0, 1] > 0.8
    assert 0.75 < stays.mean() < 0.85
    assert right / 300 == pytest.approx(0.9, abs=0.01)


def test_late_updates_weigh_by_age_and_by_how_much_they_would_move_the_mean():
    late = [timed(2, [2.0, 6.0, 0.0], round=4), timed(3, [2.0, 0.0, 3.0], round=3)]
    fresh = [timed(0, [1.0, 0.0, 0.0], round=5), timed(1, [3.0, 0.0, 0.0], round=5)]
    packed = [{"client": one.client_id, "arrives": 0.0, "update": _packed(one, 0.0)["update"]} for one in late]
    state, _ = REFL().aggregate(context(5, {"late": packed}), fresh)
    # ū = (2, 0, 0); gaps 36 and 9 over (n + 1)² · ‖ū‖² = 36: Λ = 1 and 1/4.
    first = 0.65 / 2 + 0.35 * (1 - math.exp(-1.0))
    second = 0.65 / 3 + 0.35 * (1 - math.exp(-0.25))
    total = 2 + first + second
    expected = [1.0 + (4.0 + 2 * first + 2 * second) / total, 2.0 + 6 * first / total, 3.0 + 3 * second / total]
    assert state["w"][0].tolist() == pytest.approx(expected)
