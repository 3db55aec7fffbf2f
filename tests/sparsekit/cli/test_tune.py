"""`sparsekit tune` as a user meets it, commands as its trials, and its search, which resumes after any death."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import ended

from sparsekit.cli.commands import Commands, filled, metric_pattern, read_metric
from sparsekit.cli.main import execute
from sparsekit.errors import InvalidValueError

pytest.importorskip("optuna", reason="optuna is not installed; pip install '.[tune]'")

from sparsekit.bandit import registry
from sparsekit.bandit.search_space import parse_axes
from sparsekit.cli.search import opened

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
    assert execute([*BASIC, "--trials", "4", "--deterministic", "-q"]) == 0
    assert "recommended" not in capsys.readouterr().out  # a trial that is the best one is not named twice


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


def test_a_filled_command_line_can_be_pasted_into_a_shell() -> None:
    line = filled("printf '%s|%s' \"it's {x}\" 'a;b'", {"x": "1e-07"}, trial=1)
    assert subprocess.run(line, shell=True, capture_output=True, text=True, check=True).stdout == "it's 1e-07|a;b"


def read(pattern: str, *outputs: str) -> float:
    return read_metric(metric_pattern(pattern), *outputs)


def test_the_last_match_counts_and_standard_error_where_standard_output_has_none() -> None:
    assert read(r"acc: (\S+)", "acc: 0.1\nacc: 0.25\nbest so far\n") == 0.25
    assert read(r"^(\d+) ms$", "7 ms\n12 ms\nabout 9 ms\n") == 12.0
    assert read(r"loss=(?:[a-z]+=)?(-?[\d.e-]+)", "loss=val=-1e-3") == -0.001
    assert read(r"acc (\S+)", "acc 1", "acc 2") == 1.0
    assert read(r"acc (\S+)", "", "acc 2") == 2.0
    # Neither colors nor progress bars hide it.
    assert read(r"^acc: (\S+)$", "10 %\r50 %\racc: \x1b[1;32m0.75\x1b[0m\r\n") == 0.75


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "does not match"),
        ("acc nan", "the metric is nan"),
        ("acc -inf", "is -inf"),
        ("acc 1e200", "is 1e\\+200"),
        ("acc 1,5", "captured .1,5., which is not a number"),
    ],
)
def test_an_output_without_a_finite_number_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        read(r"acc (\S+)", text)


def run(line: str, folder: Path, *, timeout: float | None = None) -> tuple[float | None, str]:
    with Commands(metric_pattern(r"score (\S+)"), folder, timeout_seconds=timeout) as commands:
        commands.start(3, line)
        while True:
            for number, score, reason in commands.poll():
                assert number == 3
                return score, reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("echo no room >&2; exit 7", "exit code 7: no room"),
        ("kill -9 $$", "signal 9"),
        ("cat", "the output does not match"),  # which also shows that it reads nothing from the terminal
    ],
)
def test_what_went_wrong_is_the_reason(line: str, reason: str, tmp_path: Path) -> None:
    score, found = run(line, tmp_path)
    assert score is None
    assert found.startswith(reason)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie whose parent has not looked yet is dead.
    return not Path(f"/proc/{pid}/stat").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


@pytest.mark.parametrize("listens", [True, False])
def test_a_command_that_takes_too_long_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    monkeypatch.setattr("sparsekit.cli.commands._GRACE_SECONDS", 0.2)
    deaf = "" if listens else "trap '' TERM; "
    began = time.monotonic()
    found = run(f"{deaf}sleep 30 & echo $!; wait; sleep 30", tmp_path, timeout=1.5)
    assert found == (None, "ran longer than 1.5 s")
    assert 1.5 <= time.monotonic() - began < 20
    child, deadline = int((tmp_path / "0003.out").read_text()), time.monotonic() + 20
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(child)


class Died(Exception):
    """Stands for the death of the process."""


class Here:
    """Commands that end as soon as they are polled, the latest first: the line is the number to score."""

    def __init__(self, *, dies_at: str = "", after: int = 0) -> None:
        self.dies_at, self.left, self.most = dies_at, after, 0
        self.running: dict[int, str] = {}
        self.begun: list[int] = []

    def _count(self, event: str) -> None:
        self.left -= event == self.dies_at
        if self.dies_at and self.left == 0:
            raise Died

    def start(self, number: int, line: str) -> None:
        self._count("start")
        self.begun.append(number)
        self.running[number] = line
        self.most = max(self.most, len(self.running))

    def poll(self) -> Iterator[tuple[int, float | None, str]]:
        number = max(self.running)
        line = self.running.pop(number)
        self._count("end")
        yield (number, None, "no room") if line.startswith("b") else (number, -abs(float(line.split()[0]) - 0.3), "")


def rows(
    out: Path | None, *space: str, trials: int = 8, jobs: int = 1, here: Here | None = None, **settings: Any
) -> list[dict[str, Any]]:
    axes = parse_axes(space or ("x=0:1",))
    settings = {"sampler": "p-ucbv", "seed": 0, "maximize": True, "deterministic": False} | settings
    line = " ".join(f"{{{name}}}" for name in axes)
    with opened(line, axes, settings, trials=trials, jobs=jobs, out=out) as search:
        list(search.run(here or Here(), threading.Event()))
        report = search.report()
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    return [{key: value for key, value in row.items() if key != "seconds"} for row in report["trials"]]


@pytest.mark.parametrize("sampler", [*sorted(registry), "tpe", "random", "sparsekit.bandit.pucbv:PUCBV"])
@pytest.mark.parametrize(("event", "after"), [("start", 5), ("end", 4)])
def test_a_search_whose_process_died_resumes_with_the_same_trials(tmp_path: Path, sampler: str, event: str, after: int) -> None:
    whole = rows(None, sampler=sampler)
    with pytest.raises(Died):
        rows(tmp_path, sampler=sampler, here=Here(dies_at=event, after=after))
    assert rows(tmp_path, sampler=sampler) == whole
    assert len({row["values"]["x"] for row in whole}) > 2


@pytest.mark.parametrize("sampler", [*sorted(registry), "tpe", "random"])
@pytest.mark.parametrize("jobs", [1, 3])
def test_a_deterministic_command_runs_once_with_each_combination_of_values(tmp_path: Path, sampler: str, jobs: int) -> None:
    for space, size in ((("x=1:8:int",), 8), (("x=1:4:int", "mode=0.5,0.1,b"), 12)):
        found = rows(None, *space, trials=30, jobs=jobs, sampler=sampler, deterministic=True)
        assert len(found) == len({str(row["values"]) for row in found}) == size
    out = tmp_path / "run"
    part = rows(out, "x=1:8:int", trials=5, sampler=sampler, deterministic=True)
    whole = rows(out, "x=1:8:int", trials=30, sampler=sampler, deterministic=True)
    assert whole[:5] == part
    assert len({row["values"]["x"] for row in whole}) == len(whole) == 8
    free = rows(None, "x=0:1", trials=12, jobs=jobs, sampler=sampler, deterministic=True)
    assert len({row["values"]["x"] for row in free}) == len(free) == 12


def test_a_line_that_was_not_written_whole_is_done_again(tmp_path: Path) -> None:
    whole = rows(None)
    rows(tmp_path, trials=3)
    journal = tmp_path / "study.journal"
    for lost in range(1, 400, 23):
        left = journal.read_bytes()[:-lost]
        journal.write_bytes(left)
        assert [row["values"] for row in rows(tmp_path)] == [row["values"] for row in whole], lost
        journal.write_bytes(left)


@pytest.mark.parametrize("maximize", [True, False])
def test_the_best_trial_has_the_best_score_of_those_that_have_one(maximize: bool) -> None:
    axes = parse_axes(("mode=b,0.5,0.1",))
    settings = {"sampler": "random", "seed": 0, "maximize": maximize, "deterministic": False}
    with opened("{mode}", axes, settings, trials=12, jobs=1, out=None) as search:
        list(search.run(Here(), threading.Event()))
        report = search.report()
    scores = [row["score"] for row in report["trials"] if row["score"] is not None]
    failed = [row for row in report["trials"] if row["score"] is None]
    assert report["best"]["score"] == (max if maximize else min)(scores)
    assert report["best"]["runs"] == scores.count(report["best"]["score"])
    assert report["best"]["mean"] == pytest.approx(report["best"]["score"])
    assert len(failed) == report["failed"] > 0
    assert {row["error"] for row in failed} == {"no room"}


def test_trials_that_ran_together_resume_with_their_values(tmp_path: Path) -> None:
    first, second = Here(dies_at="end", after=2), Here()
    with pytest.raises(Died):
        rows(tmp_path, jobs=3, trials=6, here=first)
    found = rows(tmp_path, jobs=3, trials=6, here=second)
    assert (second.most, second.begun) == (3, [0, 1, 3, 4, 5])
    assert [row["trial"] for row in found] == list(range(6))


def test_another_search_in_the_folder_is_refused(tmp_path: Path) -> None:
    rows(tmp_path, trials=1)
    with pytest.raises(InvalidValueError, match=r"holds another search: sampler 'tpe' \(there 'p-ucbv'\)"):
        rows(tmp_path, sampler="tpe")
