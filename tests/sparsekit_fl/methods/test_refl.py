"""REFL: the contract, late updates on the simulated clock, their weights to the digit, and who is asked."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from personal import server_context, tiny_run

import sparsekit_fl as fl
from sparsekit.graph import UnitGraph
from sparsekit_fl.methods.refl import ComingAndGoing, LeastAvailable, StaleMean
from sparsekit_fl.policies.aggregate import Mean
from sparsekit_fl.testing import tiny_clients

GRAPH = UnitGraph(groups={}, shapes={"w": torch.Size([3]), "n": torch.Size([])})
STATE = {"w": torch.tensor([1.0, 2.0, 3.0]), "n": torch.tensor(10)}


def test_not_waiting_for_the_slowest_shortens_the_rounds() -> None:
    # Devices on which computing, not sending, takes the time.
    clients = [dataclasses.replace(client, capability=fl.Capability(flops_per_second=1e6)) for client in tiny_clients()]
    slow, fast = (
        tiny_run(f"refl {asked} sampling.cool_down=0 sampling.availability=none", clients=clients, rounds=8)
        for asked in ("sampling.target=1.0", "sampling.target=0.5 sampling.adaptive=false")
    )
    assert fast.cost.seconds < 0.8 * slow.cost.seconds
    assert fast.cost.seconds == pytest.approx(sum(record.seconds for record in fast.rounds))


def context(round, memory, *, clients=10, size=4):
    return server_context(round=round, clients=clients, cohort=size, rng=[3, round], memory=memory, graph=GRAPH, state=STATE)


def update(client_id, value, *, seconds=1.0, round=1):
    delta = {"w": torch.tensor(value), "n": torch.tensor(0)}
    return fl.Update(round=round, client_id=client_id, examples=10, delta=delta, cost=fl.WorkCost(seconds=seconds))


def test_late_updates_arrive_in_the_round_in_which_they_are_ready() -> None:
    policy, memory = LeastAvailable(target=0.5, cool_down=0, availability=None), {}
    first = context(1, memory)
    policy.sample(first)
    answers = [update(0, [1.0] * 3, seconds=1.0), update(1, [1.0] * 3, seconds=2.0),
               update(2, [1.0] * 3, seconds=3.5), update(3, [2.0] * 3, seconds=9.0)]  # fmt: skip
    assert [(u.client_id, age) for u, age in policy.arrivals(first, answers)] == [(0, 0), (1, 0)]
    assert policy.seconds(first) == 2.0
    # Clock 2 to 4: client 2 is ready at 3.5, client 3 not before 9.
    second = context(2, memory)
    assert not {2, 3} & set(policy.sample(second))
    arrived = policy.arrivals(second, [update(4, [1.0] * 3, seconds=2.0, round=2)])
    assert [(u.client_id, age) for u, age in arrived] == [(4, 0), (2, 1)]
    for round in range(3, 6):
        later = context(round, memory)
        policy.sample(later)
        arrived = policy.arrivals(later, [update(5, [1.0] * 3, seconds=2.0, round=round)])
    assert [(u.client_id, age) for u, age in arrived] == [(5, 0), (3, 4)]
    assert torch.equal(arrived[1][0].delta["w"], torch.tensor([2.0] * 3))
    assert memory["late"] == []


def test_the_average_round_is_a_moving_one() -> None:
    policy, memory = LeastAvailable(target=1.0, alpha=0.25, cool_down=0, availability=None), {}
    for round, seconds in ((1, 4.0), (2, 8.0)):
        ctx = context(round, memory)
        policy.sample(ctx)
        policy.arrivals(ctx, [update(0, [1.0] * 3, seconds=seconds, round=round)])
    assert memory["window"] == pytest.approx(0.25 * 4.0 + 0.75 * 8.0)


def test_those_who_are_expected_to_leave_are_asked_first(monkeypatch) -> None:
    here = [True] * 8 + [False] * 2
    likely = [True] * 5 + [False] * 5
    monkeypatch.setattr(ComingAndGoing, "advance", lambda self, memory, count, rng: (here, likely))
    policy = LeastAvailable(cool_down=2)
    memory: dict = {}
    assert set(policy.sample(context(1, memory))) > {5, 6, 7}
    assert not {8, 9} & set(policy.sample(context(2, memory)))


def test_who_has_just_been_asked_rests_while_others_can_be_asked() -> None:
    policy, memory = LeastAvailable(cool_down=2, availability=None), {}
    first, second = policy.sample(context(1, memory)), policy.sample(context(2, memory))
    assert not set(first) & set(second)
    assert len(policy.sample(context(3, memory))) == 4
    crowd = LeastAvailable(cool_down=5, availability=None)
    memory = {}
    assert all(len(crowd.sample(context(round, memory))) == 4 for round in range(1, 6))


def test_clients_stay_as_they_are_with_their_own_probability() -> None:
    memory, changes, right, before = {}, np.zeros(200), 0.0, None
    chain, rng = ComingAndGoing(stay_low=0.7, stay_high=0.9, accuracy=0.8), np.random.default_rng(0)
    for _ in range(300):
        now, expected = chain.advance(memory, 200, rng)
        changes += 0 if before is None else np.array(now) != before
        before = np.array(now)
        right += np.mean(np.array(expected) == memory["next"].numpy())
    stays = 1 - changes / 299
    assert np.corrcoef(stays, memory["stay"].numpy())[0, 1] > 0.8
    assert 0.75 < stays.mean() < 0.85
    assert right / 300 == pytest.approx(0.8, abs=0.01)


def combine(policy, *pairs):
    return policy.combine(context(5, {}), STATE, pairs)["w"].tolist()


FRESH = [(update(0, [1.0, 0.0, 0.0]), 0), (update(1, [3.0, 0.0, 0.0]), 0)]


def test_late_updates_weigh_by_age_and_by_how_much_they_would_move_the_mean() -> None:
    late = [(update(2, [2.0, 6.0, 0.0]), 1), (update(3, [2.0, 0.0, 3.0]), 2)]
    # ū = (2, 0, 0); gaps 36 and 9 over (n + 1)² · ‖ū‖² = 36: Λ = 1 and 1/4.
    first = 0.65 / 2 + 0.35 * (1 - math.exp(-1.0))
    second = 0.65 / 3 + 0.35 * (1 - math.exp(-0.25))
    total = 2 + first + second
    expected = [1.0 + (4.0 + 2 * first + 2 * second) / total, 2.0 + 6 * first / total, 3.0 + 3 * second / total]
    assert combine(StaleMean(beta=0.35), *late, *FRESH) == pytest.approx(expected)


def test_without_late_updates_it_is_the_mean_and_without_fresh_ones_they_weigh_by_age_alone() -> None:
    assert combine(StaleMean(), *FRESH) == combine(Mean("uniform"), *FRESH) == [3.0, 2.0, 3.0]
    late = [(update(0, [1.0, 0.0, 0.0]), 1), (update(1, [4.0, 0.0, 0.0]), 3)]
    assert combine(StaleMean(beta=0.0), *late) == pytest.approx([1.0 + (1.0 / 2 + 4.0 / 4) / (1 / 2 + 1 / 4), 2.0, 3.0])
