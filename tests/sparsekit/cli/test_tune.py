"""`sparsekit tune` as a user meets it: output, errors, Ctrl-C, kill -9 and resuming."""

import json
import re
import signal
import sys
from pathlib import Path

import pytest
from commands import ended

from sparsekit.cli.main import execute

pytest.importorskip("optuna", reason="optuna is not installed; pip install '.[tune]'")

SCORE = "awk -v x={x} 'BEGIN { print \"score\", -(x - 0.3) ^ 2 }'"
BASIC = ["tune", SCORE, "--space", "x=0:1", "--metric", r"score (\S+)", "--sampler", "p-ucbv"]
SLOW = ["tune", f"sleep 0.15; {SCORE}", *BASIC[2:]]


def values(folder: Path) -> list[float]:
    """What was tried, and has ended."""
    return [row["values"]["x"] for row in json.loads((folder / "trials.json").read_text())["trials"]]


def finished(folder: Path) -> int:
    """How many trials have ended: Optuna's operation 6 with a state of its own."""
    path = folder / "study.journal"
    lines = path.read_text().splitlines() if path.exists() else []
    return sum('"op_code":6' in line for line in lines)


def test_a_search_ends_with_the_best_value_and_the_command_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute([*BASIC, "--trials", "4"]) == 0
    captured = capsys.readouterr()
    assert "4 trials; p-ucbv, larger is better" in captured.out
    assert "best: awk -v x=0." in captured.out
    assert re.search(r"metric by trial: [▁▂▃▄▅▆▇█]{4}  ", captured.out)
    lines = captured.err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["trial 0", "trial 1", "trial 2", "trial 3"]
    assert lines[0].endswith("  best")


def test_without_optuna_the_error_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sparsekit.cli.search", "sparsekit.bandit.optuna"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert execute([*BASIC, "--trials", "1"]) == 2
    assert ".[tune]" in capsys.readouterr().err


def test_a_search_that_is_ended_or_killed_says_how_to_resume_and_loses_nothing(tmp_path: Path) -> None:
    assert execute([*BASIC, "--trials", "8", "--out", str(tmp_path / "whole"), "-q"]) == 0
    folder = tmp_path / "killed"
    begin = [*SLOW, "--trials", "8", "--out", str(folder)]
    for place, number in enumerate((signal.SIGINT, signal.SIGKILL, signal.SIGTERM)):
        code, _, err = ended(begin, number, lambda wanted=2 * place + 1: finished(folder) >= wanted)
        assert finished(folder) < 8
        if number != signal.SIGKILL:
            assert code == 130, err
            assert "of 8 trials; best so far" in err
            assert "the same command line resumes" in err
            assert "Traceback" not in err
    assert execute([*begin, "-q"]) == 0
    assert values(folder) == values(tmp_path / "whole")
