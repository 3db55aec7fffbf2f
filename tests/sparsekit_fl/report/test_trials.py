"""Trials and sections: what a folder holds, and what may stand in one table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from saved_results import result, save

from sparsekit.errors import DataError
from sparsekit_fl.options.config import HETEROGENEITY
from sparsekit_fl.report.trials import Level, Trial, collect, level_of, sections_of


def test_levels_are_read_from_the_configuration() -> None:
    assert level_of(result("a", heterogeneity="low")["config"]) == Level("low")
    assert level_of(result("a", lack_classes=8)["config"]) == Level("high", 8)
    assert level_of({"capability_levels": [1.0, 0.3]}) == Level()
    assert level_of({"capability_levels": None}) == Level()
    assert level_of({}) == Level()


def test_levels_are_ordered_from_less_to_more_different_clients() -> None:
    levels = [Level("high", 2), Level(), Level("low", 8), Level("median", 2), Level("low", 2)]
    ordered = sorted(levels, key=lambda level: level.order)
    assert ordered == [Level(), Level("low", 2), Level("low", 8), Level("median", 2), Level("high", 2)]
    assert list(HETEROGENEITY) == ["low", "median", "high"]


def test_a_folder_of_runs_is_one_section_with_methods_in_the_order_asked_for(tmp_path: Path) -> None:
    save(tmp_path, *(result(method, seed) for method in ("a", "b", "c") for seed in (1, 0)))
    (section,) = sections_of(collect(tmp_path), order=["c", "x", "b"])
    assert section.title == "cnn on mnist, 100 clients, 100 rounds"
    assert section.slug == "cnn-on-mnist-100-clients-100-rounds"
    assert section.dataset == "mnist"
    assert section.methods == ("c", "b", "a")
    assert section.seeds == (0, 1)
    assert [(trial.seed, trial.method) for trial in section.trials] == [(s, m) for s in (0, 1) for m in "cba"]
    assert section.level_text(Level("high")) == ""


def test_levels_stay_in_one_section_and_other_settings_do_not(tmp_path: Path) -> None:
    other = result("a", 7)
    other["config"]["training"]["lr"] = 0.5
    save(tmp_path, result("a", heterogeneity="low"), result("a"), result("a", 3, rounds=50, dataset="cifar10"), other)
    sections = sections_of(collect(tmp_path))
    assert sorted((section.title, len(section.trials)) for section in sections) == [
        ("cnn on cifar10, 100 clients, 50 rounds", 1),
        ("cnn on mnist, 100 clients, 100 rounds, lr 0.1", 2),
        ("cnn on mnist, 100 clients, 100 rounds, lr 0.5", 1),
    ]
    levels = next(section for section in sections if len(section.trials) == 2)
    assert levels.levels == (Level("low"), Level("high"))
    assert levels.level_text(Level("low")) == "heterogeneity low"


def test_a_method_that_decides_an_option_itself_stands_beside_those_that_do_not() -> None:
    fixed = result("rcr-fix")
    fixed["config"]["capability"] = "fixed"
    fixed["policies"] = {"capability": "fixed"}
    dynamic = result("p-ucbv-dyn")
    dynamic["policies"] = {"capability": "dynamic"}
    (section,) = sections_of(map(Trial.of, (fixed, dynamic, result("fedavg"))))
    assert set(section.methods) == {"fedavg", "rcr-fix", "p-ucbv-dyn"}
    (alone,) = sections_of(map(Trial.of, (fixed, dynamic)))
    assert len(alone.trials) == 2
    asked = result("fedavg", 1)
    asked["config"]["capability"] = "fixed"
    assert len(sections_of(map(Trial.of, (asked, result("fedavg"))))) == 2, "an option of the run parts them"


def test_how_often_a_run_was_scored_and_where_it_ran_do_not_part_it(tmp_path: Path) -> None:
    other = result("a", 1)
    other["config"].update(eval_every=5, device="cuda")
    assert len(sections_of(collect(save(tmp_path, result("a"), other)))) == 1


def test_a_result_saved_before_an_option_existed_stands_with_those_that_did_not_use_it() -> None:
    newer, used = result("a", 1), result("a", 2)
    newer["config"]["min_replies"] = None
    used["config"]["min_replies"] = 3
    assert len(sections_of(map(Trial.of, (result("a"), newer)))) == 1
    assert len(sections_of(map(Trial.of, (result("a"), used)))) == 2


def test_a_result_that_counts_clients_per_round_stands_with_those_that_call_it_a_cohort() -> None:
    older = result("a", 1)
    older["config"]["clients_per_round"] = older["config"].pop("cohort")
    (section,) = sections_of(map(Trial.of, (older, result("a"))))
    assert [trial.config["cohort"] for trial in section.trials] == [10, 10]


def test_results_under_other_names_and_a_single_run_are_found(tmp_path: Path) -> None:
    (tmp_path / "mnist-a.json").write_text(json.dumps(result("a")))
    (tmp_path / "compare.json").write_text("{}")
    (tmp_path / "step.json").write_text("no JSON")
    assert [trial.method for trial in collect(tmp_path)] == ["a"]
    single = tmp_path / "single"
    single.mkdir()
    (single / "result.json").write_text(json.dumps(result("b")))
    assert [trial.method for trial in collect(single)] == ["b"]


@pytest.mark.parametrize("file", ["trial.json", "cell.json"])
def test_failed_and_unfinished_trials_are_told_apart(file: str, tmp_path: Path) -> None:
    save(tmp_path, result("a"))
    for name, error in (("b", "it broke"), ("c", None)):
        (tmp_path / name).mkdir()
        raw = {"method": name, "seed": 0, "config": result(name)["config"], "policies": {}, "error": error}
        (tmp_path / name / file).write_text(json.dumps(raw))
    (section,) = sections_of(collect(tmp_path))
    assert [trial.method for trial in section.finished] == ["a"]
    assert [(trial.method, trial.error) for trial in section.failed] == [("b", "it broke")]
    assert len(section.trials) == 3


def test_what_failed_before_it_had_settings_stands_with_what_was_run_beside_it() -> None:
    lost = Trial(method="b", seed=0, config={}, error="no data")
    (section,) = sections_of([lost, Trial.of(result("a"))])
    assert section.methods == ("a", "b")
    (alone,) = sections_of([lost])
    assert alone.failed == (lost,)


@pytest.mark.parametrize("content", [None, "[]", '{"method": "a"}', "{"])
def test_a_folder_without_results_or_with_damaged_ones_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a/trial.json").write_text(content)
    with pytest.raises(DataError, match="holds no result" if content is None else "is damaged"):
        collect(tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        collect(tmp_path / "nowhere")
