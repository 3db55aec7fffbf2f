"""Asynchronous rounds: who comes in when, how much it counts, and the same bits from any engine and after a resume."""

from types import SimpleNamespace

import pytest
import torch
from personal import tiny_run

import sparsekit_fl as fl
from sparsekit.errors import InvalidValueError
from sparsekit_fl.engines.base import Reply
from sparsekit_fl.server.server import aged
from sparsekit_fl.server.steps import Simulated


def update(client_id, seconds=1.0, value=1.0):
    return fl.Update(
        round=1,
        client_id=client_id,
        examples=1,
        delta={"w": torch.tensor([value]), "steps": torch.tensor([4])},
        cost=fl.WorkCost(seconds=seconds),
    )


class Fake:
    """A server and a pool whose clients take the seconds that the test says."""

    def __init__(self, *starting, cohort, buffer):
        config = fl.RunConfig(rounds=9, cohort=cohort, async_buffer=buffer)
        self.spec, self.state = SimpleNamespace(config=config), SimpleNamespace(memory={})
        self.with_scoring_time = self.validated = lambda update, *_: update
        self.clients, self.taken, self._starting = range(5), [], list(starting)

    def begin(self, round):
        self._seconds = self._starting.pop(0)

    def sample(self, ids, room):
        assert len(self._seconds) <= room
        assert set(self._seconds) <= set(ids)
        return list(self._seconds)

    def make_assignments(self, ids):
        return [SimpleNamespace(client_id=id, round=1) for id in ids]

    def map(self, assignments, memory_rounds):
        return [
            Reply(client_id=one.client_id, update=update(one.client_id, self._seconds[one.client_id])) for one in assignments
        ]

    def aggregate(self, updates, ages):
        self.taken = [(update.client_id, age) for update, age in zip(updates, ages, strict=True)]


def test_the_fast_come_in_first_and_the_slow_are_older():
    fake = Fake({0: 9.0, 1: 2.0, 2: 3.0}, {3: 1.0, 4: 9.0}, cohort=2, buffer=2)
    clock = Simulated(fake, fake, lambda *_: None)
    # 0 is slow. 1 comes in at 2, 2 starts there and comes in at 5.
    step = clock.step(1, {})
    assert (fake.taken, step.cost.seconds) == ([(1, 0), (2, 0)], 5.0)
    # 3 starts at 5 and comes in at 6, 4 starts at 6; 0 comes in at 9, one aggregation after its model.
    step = clock.step(2, {})
    assert (fake.taken, step.cost.seconds) == ([(0, 1), (3, 0)], 4.0)
    assert [(flight["client"], flight["end"]) for flight in fake.state.memory["asynchronous"]["flights"]] == [(4, 15.0)]
    assert clock.under_way == Simulated(fake, fake, lambda *_: None).under_way == [4]


def test_an_old_change_counts_less_and_integers_whole():
    old = aged(update(0, value=3.0), 3, 0.5)
    assert old.delta["w"].item() == 1.5
    assert old.delta["steps"].item() == 4
    assert aged(update(0, value=3.0), 0, 0.5).delta["w"].item() == 3.0
    assert aged(update(0, value=3.0), 3, 0.0).delta["w"].item() == 3.0


def test_steps_of_the_server_come_sooner_than_rounds_that_wait():
    assert tiny_run(rounds=6, async_buffer=2).cost.seconds < 0.7 * tiny_run(rounds=6).cost.seconds


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("refl", {}, "decides itself which updates count"),
        ("prunefl", {}, "changes the model beside adding up updates"),
        ("fedavg", {"async_buffer": 9}, r"async_buffer must be at most cohort \(4\)"),
    ],
)
def test_what_cannot_be_asynchronous_says_why(method, options, message):
    with pytest.raises(InvalidValueError, match=message):
        tiny_run(method, **{"async_buffer": 2, **options})
