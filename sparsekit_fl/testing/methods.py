"""MethodContract: what every method must satisfy. Inherit it and supply one fixture."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsekit_fl.engines.embedded import Embedded
from sparsekit_fl.errors import RunInterrupted
from sparsekit_fl.methods.method import Method
from sparsekit_fl.results.records import Observer, RoundRecord, RunResult
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing.tiny import tiny_clients, tiny_config, tiny_problem

__all__ = ["MethodContract", "StopAfter"]


class StopAfter(Observer):
    """Raise KeyboardInterrupt, as Ctrl-C does, when a round is saved."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_round(self, record: RoundRecord) -> None:
        """Stop there."""
        if record.round == self.round:
            raise KeyboardInterrupt


class MethodContract:
    """What holds for every method.

    Supply the fixture `make`::

        class TestMyMethod(MethodContract):
            @pytest.fixture
            def make(self):
                return my_method
    """

    @pytest.fixture
    def make(self) -> Callable[[], Method]:
        """To be supplied: a function without arguments → the method."""
        pytest.fail("a MethodContract needs a fixture `make` that returns a function () -> Method")

    def test_every_round_has_a_record_and_the_scores_are_fractions(self, make: Callable[[], Method]) -> None:
        result = _run(make())
        assert [record.round for record in result.rounds] == [1, 2, 3, 4]
        assert all(not record.dropped for record in result.rounds)
        assert 0.0 <= result.final.personal["accuracy"] <= 1.0
        assert math.isfinite(result.final.personal["loss"])
        assert len(result.final.per_client) == 8

    def test_work_costs_flops_bytes_and_time(self, make: Callable[[], Method]) -> None:
        cost = _run(make()).cost
        assert min(cost.flops_compact, cost.flops_rowmask, cost.uplink_bytes, cost.downlink_bytes) > 0
        assert min(cost.seconds, cost.wall_seconds) > 0

    def test_one_seed_gives_one_result_for_any_number_of_workers(self, make: Callable[[], Method]) -> None:
        first, second, third = _run(make()), _run(make()), _run(make(), workers=2)
        assert first.final.state_sha256 == second.final.state_sha256 == third.final.state_sha256
        assert first.final.personal == second.final.personal == third.final.personal
        assert [record.ratios for record in first.rounds] == [record.ratios for record in third.rounds]

    def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(self, make: Callable[[], Method], tmp_path: Path) -> None:
        with pytest.raises(RunInterrupted):
            _run(make(), out=tmp_path, stop=2)
        resumed, whole = _run(make(), out=tmp_path, resume=True), _run(make())
        assert resumed.final.state_sha256 == whole.final.state_sha256
        assert resumed.final.personal == whole.final.personal
        assert [record.loss for record in resumed.rounds] == [record.loss for record in whole.rounds]

    def test_policies_hold_no_state(self, make: Callable[[], Method]) -> None:
        method = make()
        before = repr(method)
        run(method, tiny_problem(), tiny_clients(), tiny_config(rounds=2))
        assert repr(method) == before
        assert method.describe() == make().describe()


def _run(
    method: Method, *, workers: int = 1, out: Path | None = None, resume: bool = False, stop: int | None = None
) -> RunResult:
    return run(
        method,
        tiny_problem(),
        tiny_clients(),
        tiny_config(),
        engine=Embedded(workers),
        out=out,
        resume=resume,
        observers=() if stop is None else (StopAfter(stop),),
    )
