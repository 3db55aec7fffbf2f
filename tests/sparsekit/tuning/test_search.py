"""The loop of a search: what the bandit learns, failures, parallel trials, and going on after any death."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from sparsekit.bandit import registry
from sparsekit.errors import DataError, InvalidValueError
from sparsekit.tuning.config import TuneConfig
from sparsekit.tuning.journal import Journal, Record
from sparsekit.tuning.search import Observer, Search

SCORE = "awk -v x={x} 'BEGIN { print \"score\", -(x - 0.3) ^ 2 }'"
# Above 0.5 it fails, as a training does that diverges.
FRAGILE = 'awk -v x={x} \'BEGIN { if (x > 0.5) { print "too large" > "/dev/stderr"; exit 3 }; print "score", x }\''


LINE = Record(trial=1, pull=0, values={}, command="", status="ok", metric=None, reason=None, code=0, seconds=0.0)


def config(command: str = SCORE, **options: Any) -> TuneConfig:
    given = {"space": ("x=0:1",), "metric": r"score (\S+)", "maximize": True, "bandit": "p-ucbv", "seed": 0, "horizon": 10}
    return TuneConfig(command=command, **(given | options))


@contextmanager
def opened(folder: Path, tune: TuneConfig) -> Iterator[Search]:
    journal = Journal(folder)
    journal.open(asdict(tune))
    try:
        yield Search(tune, journal)
    finally:
        journal.close()


def told(search: Search) -> list[tuple[Any, float]]:
    return [(value, reward) for _, value, reward in search.bandit.state_dict()["pulls"]["told"]]


def plain(folder: Path) -> list[dict[str, Any]]:
    """The trials without the time that they took."""
    lines = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def test_the_bandit_is_told_the_values_and_metrics_of_the_trials(tmp_path: Path) -> None:
    with opened(tmp_path, config()) as search:
        search.run(5)
        assert told(search) == [(record.values["x"], record.metric) for record in search.records]
        assert [record.trial for record in search.records] == [1, 2, 3, 4, 5]
        best = search.best()
        assert best is not None
        assert best.metric == max(record.metric or -9 for record in search.records)
        assert best.command == SCORE.replace("{x}", f"{best.values['x']!r}")


def test_where_less_is_better_the_reward_is_the_negative_metric(tmp_path: Path) -> None:
    with opened(tmp_path, config(maximize=False)) as search:
        search.run(4)
        assert told(search) == [(record.values["x"], -(record.metric or 0.0)) for record in search.records]
        assert search.report()["best"]["metric"] == min(record.metric or 9 for record in search.records)


def test_a_failed_trial_is_noted_and_counts_as_the_worst_so_far(tmp_path: Path) -> None:
    with opened(tmp_path, config(FRAGILE, bandit="ucb-v", horizon=8)) as search:
        search.run(8)
        failed = [record for record in search.records if record.status == "failed"]
        assert {record.values["x"] for record in failed} >= {0.75, 1.0}
        assert all(record.reason == "exit code 3: too large" and record.metric is None for record in failed)
        assert search.report()["failed"] == len(failed)
        assert len(told(search)) == 8
        worst = min(record.metric for record in search.records if record.metric is not None)
        assert all(reward >= worst for _, reward in told(search))
        assert {reward for value, reward in told(search) if value > 0.5} <= {0.0, 0.25, 0.5}


def test_failures_before_any_success_stay_open_until_there_is_one(tmp_path: Path) -> None:
    tune = config(FRAGILE)
    with opened(tmp_path, tune) as search:
        for trial in (1, 2):
            pull = search._ask()
            record = replace(LINE, trial=trial, pull=pull.pull.id, values={"x": 0.9}, status="failed")
            search.journal.append(record)
            search._settle(record)
        assert told(search) == []
        search._save()
    with opened(tmp_path, tune) as search:
        good = replace(LINE, trial=3, pull=search._ask().pull.id, values={"x": 0.25}, metric=0.25)
        search.journal.append(good)
        search._settle(good)
        assert told(search) == [(0.9, 0.25), (0.9, 0.25), (0.25, 0.25)]


def test_when_all_fail_there_is_no_best(tmp_path: Path) -> None:
    with opened(tmp_path, config("echo {x}; exit 1")) as search:
        search.run(3)
        assert search.best() is None
        assert search.report()["recommended"] is None
        assert [record.reason for record in search.records] == ["exit code 1"] * 3


def test_a_trial_that_takes_too_long_has_failed(tmp_path: Path) -> None:
    with opened(tmp_path, config("sleep 20; echo score {x}")) as search:
        search.run(1, timeout_seconds=0.2)
        assert (search.records[0].reason, search.records[0].code) == ("ran longer than 0.2 s", None)


class StopAt(Observer):
    def __init__(self, event: str, count: int) -> None:
        self.event, self.left = event, count

    def _count(self, event: str) -> None:
        self.left -= event == self.event
        if self.left == 0:
            raise KeyboardInterrupt

    def on_trial(self, search: Search, trial: int, values: Mapping[str, float]) -> None:
        self._count("trial")

    def on_record(self, search: Search, record: Record) -> None:
        self._count("record")


@pytest.mark.parametrize("bandit", sorted(registry))
@pytest.mark.parametrize(("event", "count"), [("trial", 1), ("trial", 4), ("record", 3)])
def test_a_search_that_was_stopped_goes_on_to_the_same_bits(tmp_path: Path, bandit: str, event: str, count: int) -> None:
    tune = config(bandit=bandit)
    with opened(tmp_path / "whole", tune) as search:
        search.run(6)
    with opened(tmp_path / "parts", tune) as search, pytest.raises(KeyboardInterrupt):
        search.run(6, observer=StopAt(event, count))
    with opened(tmp_path / "parts", tune) as search:
        assert len(search.records) == (count if event == "record" else count - 1)
        search.run(6)
    assert plain(tmp_path / "whole") == plain(tmp_path / "parts")
    assert (tmp_path / "whole/state.json").read_text() == (tmp_path / "parts/state.json").read_text()


def test_a_process_that_died_at_any_write_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune, writes = config(), 0
    with opened(tmp_path / "whole", tune) as search:
        search.run(4)

    class Died(Exception):
        pass

    def dying(method: str, after: int) -> Any:
        original = getattr(Journal, method)

        def write(self: Journal, value: Any) -> None:
            nonlocal writes
            writes += 1
            if writes == after:
                if method == "append":  # half a line reached the disk
                    with (self.folder / "trials.jsonl").open("ab") as file:
                        file.write(b'{"trial": 1, "pu')
                raise Died
            original(self, value)

        return write

    for method in ("append", "save"):
        for after in (1, 2, 3, 4):
            folder, writes = tmp_path / f"{method}{after}", 0
            with monkeypatch.context() as patch:
                patch.setattr(Journal, method, dying(method, after))
                with opened(folder, tune) as search, pytest.raises(Died):
                    search.run(4)
            with opened(folder, tune) as search:
                search.run(4)
            assert plain(folder) == plain(tmp_path / "whole")
            assert (folder / "state.json").read_text() == (tmp_path / "whole/state.json").read_text()


def test_several_jobs_run_at_once_and_all_are_told(tmp_path: Path) -> None:
    with opened(tmp_path, config("sleep 0.2; echo score {x}")) as search:
        search.run(6, jobs=3)
        assert sorted(record.trial for record in search.records) == [1, 2, 3, 4, 5, 6]
        assert len(told(search)) == 6
        assert search.bandit.state_dict()["pulls"]["open"] == []


def test_a_search_can_be_lengthened(tmp_path: Path) -> None:
    with opened(tmp_path, config()) as search:
        search.run(2)
    with opened(tmp_path, config()) as search:
        search.run(2)
        assert len(search.records) == 2
        search.run(4)
        assert len(search.records) == 4


def test_whole_numbers_are_told_as_they_were_run(tmp_path: Path) -> None:
    with opened(tmp_path, config("echo score {n}", space=("n=1:9:int",))) as search:
        search.run(4)
        assert all(value == reward and value == int(value) for value, reward in told(search))


def test_several_numbers_are_tuned_at_once_and_go_on_to_the_same_bits(tmp_path: Path) -> None:
    command = "awk -v x={x} -v n={n} 'BEGIN { print \"score\", -(x - 0.3) ^ 2 - (n - 5) ^ 2 / 50 }'"
    tune = config(command, space=("x=0:1", "n=1:64:log:int"), bandit="split-ucbv")
    with opened(tmp_path / "whole", tune) as search:
        search.run(8)
        assert {name for value, _ in told(search) for name in value} == {"x", "n"}
        assert all(float(record.values["n"]).is_integer() for record in search.records)
    with opened(tmp_path / "parts", tune) as search, pytest.raises(KeyboardInterrupt):
        search.run(8, observer=StopAt("trial", 5))
    with opened(tmp_path / "parts", tune) as search:
        search.run(8)
    assert plain(tmp_path / "whole") == plain(tmp_path / "parts")
    assert (tmp_path / "whole/state.json").read_text() == (tmp_path / "parts/state.json").read_text()


def test_a_deterministic_command_line_is_never_run_twice(tmp_path: Path) -> None:
    with opened(tmp_path, config("echo score {n}", space=("n=1:3:int",), bandit="ucb-v", deterministic=True)) as search:
        search.run(3)
        assert sorted(record.command for record in search.records) == ["echo score 1", "echo score 2", "echo score 3"]
        assert [record.trial for record in search.records] == [1, 2, 3]
        assert all(value == reward for value, reward in told(search))
        # All are known: after a while one is run all the same, so that the search ends.
        search.run(4)
        assert len(search.records) == 4
        assert len(told(search)) > 60
        assert search.recommended() == search.best()


def test_three_equal_metrics_make_a_command_line_certain(tmp_path: Path) -> None:
    with opened(tmp_path, config("echo score {n}", space=("n=1:2:int",), bandit="ucb-v")) as search:
        while not any(search._certain(f"echo score {n}") for n in (1, 2)):
            search.run(len(search.records) + 1)
        commands = [record.command for record in search.records]
        assert max(commands.count(command) for command in set(commands)) == 3
        assert len(told(search)) == len(commands)
        search.run(len(commands) + 4)
        assert len(told(search)) > len(search.records)


def test_a_metric_that_differs_is_never_certain(tmp_path: Path) -> None:
    count = tmp_path / "count"
    command = f"n=$(cat {count} 2>/dev/null || echo 0); echo $((n + 1)) > {count}; echo score $n {{n}}"
    with opened(tmp_path / "run", config(command, space=("n=1:2:int",), bandit="ucb-v")) as search:
        search.run(12)
        assert len({record.metric for record in search.records}) == 12


def test_a_command_line_that_failed_for_certain_counts_as_the_worst_again(tmp_path: Path) -> None:
    command = "if [ {n} -gt 2 ]; then exit 1; fi; echo score {n}"
    with opened(tmp_path, config(command, space=("n=1:3:int",), bandit="ucb-v", deterministic=True)) as search:
        search.run(3)
        search._ask()
        # At first the worst metric that was known by then, which may not have been 1 yet.
        assert [reward for value, reward in told(search) if value == 3.0][1:] != []
        assert set([reward for value, reward in told(search) if value == 3.0][1:]) == {1.0}


def test_a_search_with_certain_metrics_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    tune = config("echo score {n}", space=("n=1:8:int",), bandit="split-ucbv", deterministic=True)
    with opened(tmp_path / "whole", tune) as search:
        search.run(7)
    for count in (2, 4):
        with opened(tmp_path / "parts", tune) as search, pytest.raises(KeyboardInterrupt):
            search.run(7, observer=StopAt("trial", count))
    with opened(tmp_path / "parts", tune) as search:
        search.run(7)
    assert plain(tmp_path / "whole") == plain(tmp_path / "parts")
    assert (tmp_path / "whole/state.json").read_text() == (tmp_path / "parts/state.json").read_text()


def test_the_report_has_the_mean_of_the_trials_with_equal_values(tmp_path: Path) -> None:
    with opened(tmp_path, config("echo {x} score {trial}", bandit="ucb-v", horizon=12)) as search:
        search.run(12)
        best = search.report()["best"]
        same = [float(record.trial) for record in search.records if record.values == best["values"]]
        assert len(same) > 1
        assert (best["metric"], best["mean"], best["runs"]) == (12.0, sum(same) / len(same), len(same))


def test_two_processes_cannot_write_one_folder(tmp_path: Path) -> None:
    with opened(tmp_path, config()), pytest.raises(InvalidValueError, match="another process is tuning"):
        Journal(tmp_path).open({})
    with opened(tmp_path, config()):
        pass


def test_a_damaged_folder_is_refused_with_the_file(tmp_path: Path) -> None:
    with opened(tmp_path / "good", config()) as search:
        search.run(2)
    for name, text, message in (
        ("tune.json", "{", "tune.json is damaged"),
        ("tune.json", "[]", "tune.json is damaged"),
        ("state.json", "no", "state.json is damaged"),
        ("state.json", "{}", "state.json does not fit its trials"),
        ("state.json", '{"known": 9, "open": [], "bandit": {}}', "state.json does not fit"),
        ("trials.jsonl", "what\n", "trials.jsonl is damaged"),
        ("trials.jsonl", '{"trial": 1}\n', "trials.jsonl is damaged"),
        ("trials.jsonl", "", "knows 2 trials, and trials.jsonl has 0"),
    ):
        folder = tmp_path / "bad"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "good", folder)
        (folder / name).write_text(text)
        with pytest.raises(DataError, match=message), opened(folder, config()):
            pass
    (folder / "state.json").unlink()
    shutil.copy(tmp_path / "good/trials.jsonl", folder)
    with pytest.raises(DataError, match=r"has trials but no state.json"), opened(folder, config()):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"horizon": 0}, "--trials must be an integer >= 1"),
        ({"seed": -1}, "--seed must be an integer >= 0"),
        ({"metric": "("}, "--metric is no regular expression"),
        ({"bandit": "p-ucb"}, "did you mean 'p-ucbv'"),
        ({"space": ()}, "nothing to tune"),
        ({"command": "run {x} {y}", "space": ("x=0:1", "y=0:1")}, "p-ucbv cannot tune 2 numbers at once"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**options)
