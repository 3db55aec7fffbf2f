"""Search: proposals, failures, several trials at a time, and resuming after any death."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

from sparsekit.bandit import registry
from sparsekit.bandit.search_space import parse_axes
from sparsekit.cli.search import opened
from sparsekit.errors import InvalidValueError


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
