"""What a search writes while it runs."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from sparsekit.tuning.config import TuneConfig
from sparsekit.tuning.journal import Journal
from sparsekit.tuning.progress import LiveSearch
from sparsekit.tuning.search import Search

COMMAND = "if [ {n} -gt 3 ]; then echo '[no] room' >&2; exit 1; fi; echo score {n}"
CONFIG = TuneConfig(
    command=COMMAND, space=("n=1:4:int",), metric=r"score (\d)", maximize=True, bandit="ucb-v", seed=0, horizon=5
)


def written(folder: Path, trials: int, *, quiet: bool = False, terminal: bool = False) -> str:
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120, highlight=False, color_system=None)
    journal = Journal(folder)
    journal.open(asdict(CONFIG))
    try:
        with LiveSearch(quiet=quiet, console=console) as progress:
            Search(CONFIG, journal).run(trials, observer=progress)
    finally:
        journal.close()
    return text.getvalue()


def test_each_trial_has_a_line_and_a_new_best_says_so(tmp_path: Path) -> None:
    lines = written(tmp_path, 5).splitlines()
    assert len(lines) == 5
    assert all(line.startswith("trial ") for line in lines)
    assert any(line.endswith("failed (exit code 1: [no] room)") for line in lines)
    assert sum("  best" in line for line in lines) >= 1
    assert written(tmp_path, 6).startswith("going on after 5 trials\ntrial 6: n=")


def test_a_terminal_gets_a_bar_with_the_best_and_what_runs(tmp_path: Path) -> None:
    text = written(tmp_path, 5, terminal=True)
    assert "5/5" in text
    assert "best 3" in text


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_is_quiet(tmp_path: Path, terminal: bool) -> None:
    assert "trial" not in written(tmp_path, 2, quiet=True, terminal=terminal)
