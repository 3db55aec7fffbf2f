"""Results of every version are read with the passes by which methods decide in their FLOPs, as far as a file has them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import sparsekit_fl as fl
from sparsekit_fl.deprecations import REMOVED_KEYS
from sparsekit_fl.methods import registry
from sparsekit_fl.results.read import read_result
from sparsekit_fl.results.rounds import cost_from
from sparsekit_fl.results.scoring import FLOPS_LACK, SECONDS_LACK, complete_cost, complete_result, lacks
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing.tiny import tiny_clients, tiny_config, tiny_problem


def tiny_run(name: str = "fedlps") -> fl.RunResult:
    return run(registry[name](), tiny_problem(), tiny_clients(), tiny_config(rounds=2))


def as_of(version: str, raw: dict[str, Any]) -> dict[str, Any]:
    """The same result as version 0.1, or an early one of schema 2, wrote it."""
    old = copy.deepcopy(raw)
    for cost in (old["cost"], *(record["cost"] for record in old["rounds"])):
        cost["flops_compact"] = cost.pop("flops_compact_training")
        cost["simulated_seconds"] = cost.pop("simulated_seconds_training")
        del cost["simulated_seconds_scoring"]
        if version == "0.1":
            del cost["flops_scoring"]
    if version == "0.1":
        del old["schema"]
    return {**old, **({} if version == "0.1" else {"schema": 2})}


def test_a_result_of_this_version_is_read_as_it_was_written(tmp_path: Path) -> None:
    result = tiny_run()
    result.save(tmp_path / "result.json")
    loaded = fl.load_result(tmp_path)
    assert loaded.cost == result.cost
    assert [record.cost for record in loaded.rounds] == [record.cost for record in result.rounds]
    assert lacks(read_result(tmp_path)) == ""


def test_a_file_that_has_scoring_apart_is_read_with_it_in_its_flops(tmp_path: Path) -> None:
    result = tiny_run()
    (tmp_path / "result.json").write_text(json.dumps(as_of("0.2", result.to_dict())))
    loaded = fl.load_result(tmp_path)
    assert loaded.cost.flops_compact == result.cost.flops_compact
    assert loaded.cost.flops_compact_training == result.cost.flops_compact_training
    assert loaded.rounds[0].cost.flops_compact == result.rounds[0].cost.flops_compact
    assert loaded.cost.simulated_seconds == result.cost.seconds, "nobody can tell how long the slowest one scored"
    assert lacks(read_result(tmp_path)) == SECONDS_LACK


def test_a_file_of_version_0_1_says_that_scoring_is_not_in_it(tmp_path: Path) -> None:
    result = tiny_run()
    (tmp_path / "result.json").write_text(json.dumps(as_of("0.1", result.to_dict())))
    loaded = fl.load_result(tmp_path)
    assert loaded.cost.flops_compact == result.cost.flops_compact_training
    assert loaded.cost.flops_scoring == 0
    assert lacks(read_result(tmp_path)) == FLOPS_LACK


@pytest.mark.parametrize("policies", [{"personal": "OwnModel(select='best')"}, {"mask": "Tickets(threshold=0.5)"}])
def test_old_policies_that_score_are_known_by_their_names(policies: dict[str, str]) -> None:
    raw = {"cost": {"flops_compact": 1}, "rounds": [], "policies": policies}
    assert lacks(raw) == FLOPS_LACK
    assert lacks({**raw, "schema": 2}) == "", "that version counted them, and there were none"


def test_methods_that_do_not_score_lack_nothing_in_any_version() -> None:
    raw = tiny_run("fedavg").to_dict()
    assert lacks(raw) == ""
    del raw["schema"]
    assert lacks(raw) == ""


def test_completing_a_cost_twice_changes_nothing() -> None:
    once = complete_cost({"flops_compact": 5, "flops_scoring": 2, "simulated_seconds": 1.0})
    assert once == {
        "flops_compact": 7, "flops_scoring": 2, "flops_compact_training": 5,
        "simulated_seconds": 1.0, "simulated_seconds_training": 1.0,
    }  # fmt: skip
    assert complete_cost(once) == once
    whole = complete_result(tiny_run().to_dict())
    assert complete_result(whole) == whole


def test_keys_that_go_with_the_next_version_are_named_and_can_be_left_out() -> None:
    cost = tiny_run().to_dict()["cost"]
    assert set(REMOVED_KEYS) <= set(cost)
    for key, kept in REMOVED_KEYS.items():
        scoring = cost["flops_scoring"] if key.startswith("flops") else cost["simulated_seconds_scoring"]
        assert cost[kept] == pytest.approx(cost[key] + scoring, rel=1e-12)
    assert cost_from(cost).flops_compact == cost["flops_compact"]
