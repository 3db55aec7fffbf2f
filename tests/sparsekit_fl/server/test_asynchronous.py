"""Asynchronous rounds: who comes in when, how much it counts, and the same bits from any engine and after a resume."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sparsekit.errors import InvalidValueError
from sparsekit_fl.client.messages import Update, WorkCost
from sparsekit_fl.engines.base import Reply
from sparsekit_fl.engines.embedded import Embedded
from sparsekit_fl.errors import RunInterrupted
from sparsekit_fl.methods import registry
from sparsekit_fl.options.config import RunConfig
from sparsekit_fl.server.loop import run
from sparsekit_fl.server.server import aged
from sparsekit_fl.server.steps import Simulated
from sparsekit_fl.testing import StopAfter, tiny_clients, tiny_config, tiny_problem


def update(client_id, seconds=1.0, value=1.0):
    return Update(
        round=1,
        client_id=client_id,
        examples=1,
        delta={"w": torch.tensor([value]), "steps": torch.tensor([4])},
        cost=WorkCost(seconds=seconds),
    )


class Fake:
    """A server and a pool whose clients take the seconds that the test says."""

    def __init__(self, *starting, cohort, buffer):
        config = RunConfig(rounds=9, cohort=cohort, async_buffer=buffer)
        self.spec, self.state = SimpleNamespace(config=config), SimpleNamespace(memory={})
        self.with_scoring_time = self.validated = lambda update, *_: update
        self.taken, self._starting = [], list(starting)

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
    step = clock.step(1, {}, ids=range(5))
    assert (fake.taken, step.cost.seconds) == ([(1, 0), (2, 0)], 5.0)
    # 3 starts at 5 and comes in at 6, 4 starts at 6; 0 comes in at 9, one aggregation after its model.
    step = clock.step(2, {}, ids=range(5))
    assert (fake.taken, step.cost.seconds) == ([(0, 1), (3, 0)], 4.0)
    assert [(flight["client"], flight["end"]) for flight in fake.state.memory["asynchronous"]["flights"]] == [(4, 15.0)]
    assert clock.under_way == Simulated(fake, fake, lambda *_: None).under_way == [4]


def test_an_old_change_counts_less_and_integers_whole():
    old = aged(update(0, value=3.0), 3, 0.5)
    assert old.delta["w"].item() == 1.5
    assert old.delta["steps"].item() == 4
    assert aged(update(0, value=3.0), 0, 0.5).delta["w"].item() == 3.0
    assert aged(update(0, value=3.0), 3, 0.0).delta["w"].item() == 3.0


def config(rounds=6, **options):
    return replace(tiny_config(rounds=rounds), async_buffer=2, **options)


def ran(method="fedavg", engine=None, **options):
    return run(registry[method](), tiny_problem(), tiny_clients(), config(**options), engine=engine)


def test_steps_of_the_server_come_sooner_than_rounds_that_wait():
    waiting = run(registry["fedavg"](), tiny_problem(), tiny_clients(), tiny_config(rounds=6))
    assert ran().cost.seconds < 0.7 * waiting.cost.seconds


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "heterofl", "fedlps", "ditto", "hermes"])
@pytest.mark.same_bits
def test_any_number_of_workers_gives_the_same_bits(method):
    one, three = ran(method, rounds=3), ran(method, Embedded(workers=3), rounds=3)
    assert one.final.state_sha256 == three.final.state_sha256
    assert [record.seconds for record in one.rounds] == [record.seconds for record in three.rounds]


@pytest.mark.same_bits
def test_flower_gives_the_same_bits():
    pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")
    from local_grid import InProcess

    assert ran(rounds=3).final.state_sha256 == ran(engine=InProcess(), rounds=3).final.state_sha256


@pytest.mark.same_bits
def test_a_resumed_run_goes_on_with_those_who_are_under_way(tmp_path):
    whole = ran("fedlps")
    with pytest.raises(RunInterrupted):
        run(registry["fedlps"](), tiny_problem(), tiny_clients(), config(), out=tmp_path, callbacks=[StopAfter(3)])
    again = run(registry["fedlps"](), tiny_problem(), tiny_clients(), config(), out=tmp_path, resume=True)
    assert again.final.state_sha256 == whole.final.state_sha256


def test_server_optimizers_and_robust_rules_go_with_it():
    for options in ({"server_optimizer": "fedadam"}, {"aggregation": "median"}):
        result = ran(rounds=2, **options)
        assert all(bool(torch.isfinite(tensor).all()) for tensor in result.state.values())


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
        run(registry[method](), tiny_problem(), tiny_clients(), replace(config(), **options))
