"""LiveProgress: a bar on a terminal, a line per evaluation elsewhere, nothing when told."""

import io

import pytest
from rich.console import Console

from sparsekit_fl.callbacks import LiveProgress, RunView
from sparsekit_fl.client.messages import WorkCost
from sparsekit_fl.config import RunConfig
from sparsekit_fl.results import RoundRecord, RoundScores

SCORES = RoundScores(personal={"accuracy": 0.984}, validation={"accuracy": 0.97}, shared=None)


def record(round: int, evaluation: RoundScores | None) -> RoundRecord:
    return RoundRecord(
        round=round, cohort=(0, 1), dropped=(), loss=0.5, accuracy=0.7, ratios={}, cost=WorkCost(flops=53 * 10**10),
        seconds=1.0, evaluation=evaluation,
    )  # fmt: skip


@pytest.mark.parametrize(("terminal", "quiet"), [(False, False), (True, True), (False, True), (True, False)])
def test_a_bar_on_a_terminal_a_line_per_evaluation_elsewhere_and_nothing_when_told(terminal: bool, quiet: bool) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=160)
    with LiveProgress(quiet=quiet, label="1/2 [fedavg], seed 0", console=console) as progress:
        run = RunView(method="fedavg", config=RunConfig(rounds=2, cohort=2))
        progress.on_run_start(run)
        progress.on_round_end(run, record(1, None))
        progress.on_round_end(run, record(2, SCORES))
    if quiet:
        assert text.getvalue() == ""
    elif terminal:
        assert "accuracy 98.4%" in text.getvalue()
        assert "left" in text.getvalue()
    else:
        (line,) = text.getvalue().splitlines()
        assert line.startswith("1/2 [fedavg], seed 0 round 2/2: accuracy 98.4%, validation accuracy 97.0%, 0.530T FLOPs, ")
