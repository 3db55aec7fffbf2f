"""Study: what is proposed, failures, several trials at a time, and going on after any death."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

optuna = pytest.importorskip("optuna")

from sparsekit.bandit import registry  # noqa: E402
from sparsekit.bandit.study import Study  # noqa: E402
from sparsekit.bandit.trials import (  # noqa: E402
    Ended,
    Score,
    parse_axes,
)
from sparsekit.cli.trials import _outcome  # noqa: E402
from sparsekit.errors import InvalidValueError, UnknownNameError  # noqa: E402

Objective = Callable[[Mapping[str, str]], float | None]


class Died(Exception):
    """Stands for the death of the process."""


class Here:
    """Workers that score values as soon as they are asked, the trial that began last first."""

    def __init__(self, objective: Objective, *, dies_at: str = "", after: int = 0) -> None:
        self.objective, self.dies_at, self.left = objective, dies_at, after
        self.running: dict[int, Mapping[str, str]] = {}
        self.most = 0
        self.begun: list[int] = []

    def _count(self, event: str) -> None:
        self.left -= event == self.dies_at
        if self.dies_at and self.left == 0:
            raise Died

    def start(self, number: int, values: Mapping[str, str]) -> None:
        self._count("start")
        self.begun.append(number)
        self.running[number] = values
        self.most = max(self.most, len(self.running))

    def poll(self) -> Iterator[tuple[int, Score | Ended]]:
        number = max(self.running)
        value = self.objective(self.running.pop(number))
        self._count("end")
        yield number, Ended(value, "no room", {"seconds": 0.5})

    def stop(self, number: int) -> None:
        del self.running[number]


def hill(values: Mapping[str, str]) -> float:
    return -abs(float(values["x"]) - 0.3)


def opened(
    out: Path | None, *space: str, sampler: str = "p-ucbv", maximize: bool = True, trials: int = 10, **more: Any
) -> Study:
    axes, settings = parse_axes(space or ("x=0:1",)), {"space": list(space), "sampler": sampler}
    return Study("s", axes, settings, maximize=maximize, sampler=sampler, seed=0, trials=10, out=out, **more)


def rows(out: Path | None, objective: Objective = hill, *space: str, trials: int = 8, **more: Any) -> list[dict[str, Any]]:
    with opened(out, *space, **more) as study:
        study.run(Here(objective), trials)
        found: list[dict[str, Any]] = study.report()["trials"]
        return found


@pytest.mark.parametrize("sampler", [*sorted(registry), "tpe", "random", "sparsekit.bandit.pucbv:PUCBV"])
@pytest.mark.parametrize(("event", "after"), [("start", 5), ("end", 4)])
def test_a_study_whose_process_died_goes_on_to_the_same_trials(tmp_path: Path, sampler: str, event: str, after: int) -> None:
    whole = rows(None, hill, sampler=sampler)
    with opened(tmp_path, sampler=sampler) as study, pytest.raises(Died):
        study.run(Here(hill, dies_at=event, after=after), 8)
    assert rows(tmp_path, hill, sampler=sampler) == whole
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
def test_the_best_is_found_with_its_mean(maximize: bool) -> None:
    with opened(None, maximize=maximize) as study:
        study.run(Here(hill), 8)
        report = study.report()
    scores = [row["score"] for row in report["trials"]]
    assert report["best"]["score"] == (max if maximize else min)(scores)
    assert report["best"] == report["trials"][report["best"]["trial"]] | {"mean": report["best"]["score"], "runs": 1}
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_trials_that_ran_several_at_a_time_go_on_with_their_values_and_the_rest_follow(tmp_path: Path) -> None:
    begun: dict[int, Any] = {}

    def heard(trial: Any) -> None:
        assert begun.setdefault(trial.number, trial.params) == trial.params

    with opened(tmp_path, jobs=3) as study, pytest.raises(Died):
        study.run(Here(hill, dies_at="end", after=2), 6, heard)
    with opened(tmp_path, jobs=3) as study:
        workers = Here(hill)
        study.run(workers, 6, heard)
        assert (workers.most, workers.begun) == (3, [0, 1, 3, 4, 5])
        assert [trial.number for trial in study.ended] == list(range(6))


def test_a_grid_ends_by_itself_and_goes_on(tmp_path: Path) -> None:
    space = ("x=0.1,0.2,0.3", "y=a,b")
    assert len(rows(tmp_path, hill, *space, sampler="grid", trials=4)) == 4
    found = rows(tmp_path, hill, *space, sampler="grid", trials=99)
    assert sorted((row["values"]["x"], row["values"]["y"]) for row in found) == [
        (x, y) for x in ("0.1", "0.2", "0.3") for y in ("a", "b")
    ]


def test_what_looks_bad_is_pruned() -> None:
    class Stepwise(Here):
        def poll(self) -> Iterator[tuple[int, Score | Ended]]:
            ((number, values),) = self.running.items()
            for step in range(1, 6):
                yield number, Score(step, hill(values) * step)
                if number not in self.running:
                    return
            yield from super().poll()

    with opened(None, sampler="random", pruner="median", steps=5) as study:
        study.run(Stepwise(hill), 20)
        trials = study.report()["trials"]
        told = [_outcome(trial, None) for trial in study.ended if trial.state.name == "PRUNED"]
    states = [row["state"] for row in trials]
    assert 3 < states.count("pruned") < 16
    assert states.count("pruned") + states.count("complete") == 20
    # Its last score is of less training than those of the others, so it is not shown beside them.
    assert all((row["score"] is None) == (row["state"] == "pruned") for row in trials)
    assert all(line.startswith("pruned after step ") for line in told)


def test_another_search_in_the_place_is_refused(tmp_path: Path) -> None:
    rows(tmp_path, trials=1)
    with pytest.raises(InvalidValueError, match=r"holds another search: sampler 'tpe' \(there 'p-ucbv'\)"):
        opened(tmp_path, sampler="tpe")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sampler": "p-ucb"}, UnknownNameError, "unknown sampler 'p-ucb'; did you mean 'p-ucbv'"),
        ({"sampler": "grid"}, InvalidValueError, "--sampler grid needs values"),
        ({"pruner": "x"}, UnknownNameError, "unknown pruner 'x'"),
        ({"storage": "nowhere://x"}, InvalidValueError, "cannot be opened in nowhere"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_kept(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        opened(tmp_path / "new", **options)
    assert not (tmp_path / "new" / "study.journal").exists()
