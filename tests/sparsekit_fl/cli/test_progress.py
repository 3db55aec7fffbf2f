"""LiveProgress and TrialsProgress: draw on a terminal, and no bars anywhere else."""

import io
import itertools
import json

import pytest
from rich.console import Console
from saved_results import result

from sparsekit_fl.callbacks import LiveProgress, RunView
from sparsekit_fl.cli.progress import Events, TrialsProgress
from sparsekit_fl.client.messages import WorkCost
from sparsekit_fl.config import RunConfig
from sparsekit_fl.results import RoundRecord, RoundScores
from sparsekit_fl.trials import Trial

CONFIG = RunConfig(rounds=2, cohort=2)
SCORES = RoundScores(personal={"accuracy": 0.984}, validation={}, shared=None)


def record(round: int, evaluation: RoundScores | None) -> RoundRecord:
    return RoundRecord(
        round=round, cohort=(0, 1), dropped=(), loss=0.5, accuracy=0.7, ratios={}, cost=WorkCost(flops=53 * 10**10),
        seconds=1.0, evaluation=evaluation,
    )  # fmt: skip


@pytest.mark.parametrize(("terminal", "quiet"), [(False, False), (True, True)])
def test_it_is_silent_where_nobody_looks_or_when_told(terminal: bool, quiet: bool) -> None:
    text = io.StringIO()
    with LiveProgress(quiet=quiet, console=Console(file=text, force_terminal=terminal, width=160)) as progress:
        run = RunView(method="fedavg", config=CONFIG, clients=2)
        progress.on_run_start(run)
        progress.on_client_end(run, 0, None)
        progress.on_round_end(run, record(1, SCORES))
    assert text.getvalue() == ""


def test_a_comparison_shows_all_trials_those_that_run_and_a_line_for_each_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    # Drawing is limited to a few times a second, and this takes none.
    ticking = itertools.count()
    monkeypatch.setattr("sparsekit_fl.cli.progress.time.monotonic", lambda: float(next(ticking)))
    text = io.StringIO()
    with TrialsProgress(3, console=Console(file=text, force_terminal=True, width=160)) as board:
        board.end("fedavg, seed 0", Trial.of(result("fedavg", accuracies={100: 0.75})), ran=False)
        board.begin("fedlps, seed 0")
        # As it comes through a pipe.
        events = Events(lambda event: board.event("fedlps, seed 0", json.loads(json.dumps(event))))
        view = RunView(method="fedlps", config=CONFIG, clients=2)
        events.on_run_start(view)
        events.on_round_end(view, record(1, SCORES))
        events.on_round_end(view, record(2, None))
        board.event("fedlps, seed 0", {"said": "[a warning]"})
        board.tick()
        board.end("fedlps, seed 0", Trial.of(result("fedlps")), ran=True)
        board.end("local, seed 0", Trial(method="local", seed=0, config={}, error="it [broke]"), ran=True)
    for part in (
        "1/3 fedavg, seed 0: finished before, accuracy 75.0%", "fedlps, seed 0, preparing", "fedlps, seed 0, round 2/2",
        "accuracy 98.4%", "2/3 fedlps, seed 0: finished, accuracy 75.0%, ", "fedlps, seed 0: [a warning]",
        "3/3 local, seed 0: failed: it [broke]", "2/3 trials", "left",
    ):  # fmt: skip
        assert part in text.getvalue(), part
