"""Asynchronous rounds: who comes in when, how much it counts, and the same bits from any engine and after a resume."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparsekit.errors import InvalidValueError
from sparsekit_fl.callbacks.base import Callback
from sparsekit_fl.engines.embedded import Embedded
from sparsekit_fl.errors import RunInterrupted
from sparsekit_fl.methods import registry
from sparsekit_fl.options.config import RunConfig
from sparsekit_fl.server.asynchronous import Arrival, Flights
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing.tiny import tiny_clients, tiny_config, tiny_problem
from sparsekit_fl.wire.messages import Update, WorkCost


def update(client_id, seconds, value=1.0):
    return Update(
        round=1,
        client_id=client_id,
        examples=1,
        delta={"w": torch.tensor([value]), "steps": torch.tensor([4])},
        cost=WorkCost(seconds=seconds),
    )


def flights(memory, *, cohort=2, buffer=2, staleness=0.5):
    return Flights(RunConfig(rounds=9, cohort=cohort, async_buffer=buffer, async_staleness=staleness), memory)


def test_the_fast_come_in_first_and_the_slow_are_older():
    memory = {}
    one = flights(memory)
    # 0 is slow. 1 comes in at 2, 2 starts there and comes in at 5.
    landing = one.land([update(0, 9.0), update(1, 2.0), update(2, 3.0)], 1)
    assert [(arrival.update.client_id, arrival.age) for arrival in landing.arrivals] == [(1, 0), (2, 0)]
    assert landing.now == 5.0
    one.take(landing)
    # 3 starts at 5 and comes in at 6, 4 starts at 6; 0 comes in at 9, one aggregation after its model.
    landing = one.land([update(3, 1.0), update(4, 9.0)], 2)
    assert [(arrival.update.client_id, arrival.age) for arrival in landing.arrivals] == [(3, 0), (0, 1)]
    assert landing.now == 9.0
    one.take(landing)
    assert [(flight["client"], flight["end"]) for flight in memory["flights"]] == [(4, 15.0)]


def test_an_old_change_counts_less_and_integers_whole():
    old = Arrival(update(0, 1.0, value=3.0), 3).counted(0.5)
    assert old.delta["w"].item() == 1.5
    assert old.delta["steps"].item() == 4
    assert Arrival(update(0, 1.0, value=3.0), 0).counted(0.5).delta["w"].item() == 3.0
    assert Arrival(update(0, 1.0, value=3.0), 3).counted(0.0).delta["w"].item() == 3.0


def test_nothing_changes_before_a_landing_is_taken():
    memory = {}
    one = flights(memory)
    first = one.land([update(0, 1.0), update(1, 2.0)], 1)
    again = one.land([update(0, 1.0), update(1, 2.0)], 1)
    assert memory == {}
    assert first.now == again.now == 2.0


def config(rounds=6, **options):
    return replace(tiny_config(rounds=rounds), async_buffer=2, **options)


def ran(method="fedavg", engine=None, **options):
    return run(registry[method](), tiny_problem(), tiny_clients(), config(**options), engine=engine)


def test_every_record_has_the_clock_and_who_came_in():
    result = ran()
    assert [len(record.ratios) for record in result.rounds] == [2] * 6
    assert len(result.rounds[0].cohort) == 5, "the cohort, and one to start behind the first that comes in"
    assert all(len(record.cohort) == 2 for record in result.rounds[1:])
    assert "came in" in result.rounds[0].notes[0]
    assert result.cost.seconds == pytest.approx(sum(record.seconds for record in result.rounds))
    assert all(record.seconds > 0 for record in result.rounds)


def test_steps_of_the_server_come_sooner_than_rounds_that_wait():
    waiting = run(registry["fedavg"](), tiny_problem(), tiny_clients(), tiny_config(rounds=6))
    assert ran().cost.seconds < 0.7 * waiting.cost.seconds


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "heterofl", "fedlps", "ditto", "hermes"])
def test_any_number_of_workers_gives_the_same_bits(method):
    one, three = ran(method, rounds=3), ran(method, Embedded(workers=3), rounds=3)
    assert one.final.state_sha256 == three.final.state_sha256
    assert [record.seconds for record in one.rounds] == [record.seconds for record in three.rounds]


def test_flower_gives_the_same_bits():
    pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")
    from sparsekit_fl.engines.flower.local_grid import InProcess

    assert ran(rounds=3).final.state_sha256 == ran(engine=InProcess(), rounds=3).final.state_sha256


def test_a_resumed_run_goes_on_with_those_who_are_under_way(tmp_path):
    class Stops(Callback):
        def on_round_end(self, view, record):
            if record.round == 3:
                raise KeyboardInterrupt

    whole = ran("fedlps")
    with pytest.raises(RunInterrupted):
        run(registry["fedlps"](), tiny_problem(), tiny_clients(), config(), out=tmp_path, callbacks=[Stops()])
    again = run(registry["fedlps"](), tiny_problem(), tiny_clients(), config(), out=tmp_path, resume=True)
    assert again.final.state_sha256 == whole.final.state_sha256


def test_all_clients_under_way_at_once_take_turns():
    result = ran(rounds=4, cohort=8)
    assert [len(record.ratios) for record in result.rounds] == [2] * 4


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
