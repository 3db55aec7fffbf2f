"""MethodContract: inherit it and supply one fixture, `make`, to test a method that was written elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparsekit_fl.callbacks.base import Callback, RunView
from sparsekit_fl.engines.embedded import Embedded
from sparsekit_fl.errors import RunInterrupted
from sparsekit_fl.methods.method import Method
from sparsekit_fl.results.records import RunResult
from sparsekit_fl.results.rounds import RoundRecord
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing.tiny import tiny_clients, tiny_config, tiny_problem


class StopAfter(Callback):
    """Raise KeyboardInterrupt, as Ctrl-C does, when a round is saved."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_round_end(self, run: RunView, record: RoundRecord) -> None:
        """Stop there."""
        if record.round == self.round:
            raise KeyboardInterrupt


class MethodContract:
    """What holds for every method.

    Supply the fixture `make`, a function without arguments that returns the method::

        class TestMyMethod(MethodContract):
            @pytest.fixture
            def make(self):
                return my_method
    """

    def test_workers_and_interruptions_change_no_bit(self, make: Callable[[], Method], tmp_path: Path) -> None:
        method = make()
        before = repr(method)
        whole = _run(method)
        assert repr(method) == before, "policies hold no state"
        assert [record.round for record in whole.rounds] == [1, 2, 3, 4]
        assert all(not record.dropped for record in whole.rounds)
        assert 0.0 <= whole.final.personal["accuracy"] <= 1.0
        assert math.isfinite(whole.final.personal["loss"])
        assert len(whole.final.per_client) == 8
        cost = whole.cost
        assert min(cost.flops_compact, cost.flops_rowmask, cost.uplink_bytes, cost.downlink_bytes, cost.seconds) > 0
        with pytest.raises(RunInterrupted):
            _run(make(), workers=2, out=tmp_path, callbacks=(StopAfter(2),))
        other = _run(make(), out=tmp_path, resume=True)
        assert other.final.state_sha256 == whole.final.state_sha256
        assert other.final.personal == whole.final.personal
        assert [record.ratios for record in other.rounds] == [record.ratios for record in whole.rounds]
        assert [record.loss for record in other.rounds] == [record.loss for record in whole.rounds]


def _run(method: Method, *, workers: int = 1, **options: Any) -> RunResult:
    return run(method, tiny_problem(), tiny_clients(), tiny_config(), engine=Embedded(workers), **options)
