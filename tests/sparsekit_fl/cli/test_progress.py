"""LiveProgress: draws on a terminal, and nothing anywhere else."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from sparsekit_fl.cli.progress import LiveProgress
from sparsekit_fl.config import RunConfig
from sparsekit_fl.messages import WorkCost
from sparsekit_fl.results import RoundRecord, RoundScores, RunStart


def _watch(console: Console, *, quiet: bool = False) -> None:
    config = RunConfig(rounds=2, clients_per_round=2)
    cost = WorkCost(flops_compact=53 * 10**10)
    scores = RoundScores(personal={"accuracy": 0.984}, validation={})
    with LiveProgress(quiet=quiet, console=console) as progress:
        progress.on_start(RunStart(method="fedavg", config=config, clients=2, round=0, cost=WorkCost()))
        for round, evaluation in ((1, None), (2, scores)):
            progress.on_client(round, 0, None)
            progress.on_client(round, 1, None)
            progress.on_round(
                RoundRecord(
                    round=round, cohort=(0, 1), dropped=(), loss=0.5, accuracy=0.7, ratios={}, cost=cost, seconds=1.0,
                    evaluation=evaluation,
                )
            )  # fmt: skip


def test_it_shows_round_accuracy_cost_and_time_left() -> None:
    text = io.StringIO()
    _watch(Console(file=text, force_terminal=True, width=160))
    assert all(part in text.getvalue() for part in ("fedavg round 2/2", "accuracy 98.4%", "0.53T FLOPs", "left"))


@pytest.mark.parametrize(("terminal", "quiet"), [(False, False), (True, True)])
def test_it_is_silent_where_nobody_looks_or_when_told(terminal: bool, quiet: bool) -> None:
    text = io.StringIO()
    _watch(Console(file=text, force_terminal=terminal, width=160), quiet=quiet)
    assert text.getvalue() == ""
