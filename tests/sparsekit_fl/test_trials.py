"""Trials: what a folder holds, and what may stand in one table."""

import json
from pathlib import Path

import pytest
from saved_results import result, save

from sparsekit.errors import DataError
from sparsekit_fl.comparison import comparisons_of
from sparsekit_fl.trials import collect


def test_a_folder_of_runs_is_one_section_with_methods_in_the_order_asked_for(tmp_path: Path) -> None:
    save(tmp_path, *(result(method, seed) for method in ("a", "b", "c") for seed in (1, 0)))
    (section,) = comparisons_of(collect(tmp_path), order=["c", "x", "b"])
    assert section.title == "cnn on mnist, 100 clients, 100 rounds"
    assert section.dataset == "mnist"
    assert section.methods == ("c", "b", "a")
    assert [(trial.seed, trial.method) for trial in section.trials] == [(s, m) for s in (0, 1) for m in "cba"]


def test_other_settings_are_in_a_section_of_their_own_whose_title_names_them(tmp_path: Path) -> None:
    other = result("a", 7)
    other["config"]["training"]["lr"] = 0.5
    levels = [result("a", heterogeneity="low"), result("a"), result("a", lack_classes=8)]
    save(tmp_path, *levels, result("b"), result("a", 3, rounds=50, dataset="cifar10"), other)
    sections = comparisons_of(collect(tmp_path))
    same = "cnn on mnist, 100 clients, 100 rounds"
    assert sorted((section.title, len(section.trials)) for section in sections) == [
        ("cnn on cifar10, 100 clients, 50 rounds", 1),
        (f"{same}, heterogeneity high, lack classes 8, lr 0.1", 1),
        (f"{same}, heterogeneity high, lr 0.1", 2),
        (f"{same}, heterogeneity high, lr 0.5", 1),
        (f"{same}, heterogeneity low, lr 0.1", 1),
    ]


def test_the_same_run_twice_counts_once_and_two_results_of_one_seed_are_refused(tmp_path: Path) -> None:
    again = result("a")
    again["cost"]["wall_seconds"] = 99.0
    other = {**again, "final": {**again["final"], "state_sha256": "another"}}
    for name, made in (("copy", result("a")), ("deep/er", again), ("other", other)):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "result.json").write_text(json.dumps(made))
    (comparison,) = comparisons_of(collect(tmp_path / "copy", tmp_path / "deep"))
    assert list(comparison.table()["n"]) == ["1"]
    with pytest.raises(DataError, match=r"a, seed 0, has one result in .* and another in .*; leave one out"):
        collect(tmp_path)


def test_failed_and_unfinished_trials_are_told_apart(tmp_path: Path) -> None:
    save(tmp_path, result("a"))
    for name, error in (("b", "it broke"), ("c", None)):
        (tmp_path / name).mkdir()
        raw = {"method": name, "seed": 0, "config": result(name)["config"], "policies": {}, "error": error}
        (tmp_path / name / "trial.json").write_text(json.dumps(raw))
    (section,) = comparisons_of(collect(tmp_path))
    assert [trial.method for trial, _ in section.results] == ["a"]
    assert [(trial.method, trial.error) for trial in section.failed] == [("b", "it broke")]
    assert len(section.trials) == 3


@pytest.mark.parametrize("content", [None, "[]", '{"method": "a"}', "{"])
def test_a_folder_without_results_or_with_damaged_ones_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a/trial.json").write_text(content)
    with pytest.raises(DataError, match="holds no result" if content is None else "is damaged"):
        collect(tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        collect(tmp_path / "nowhere")
