"""Results: scores over clients, JSON that every reader accepts, typed loading, frames and plots."""

import itertools
import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from own_models import OwnModels

import sparsekit_fl as fl
from sparsekit.errors import DataError
from sparsekit_fl.client.messages import WorkCost
from sparsekit_fl.problem.metrics import accuracy, lower_is_better
from sparsekit_fl.results import KINDS, RoundRecord, RoundScores, over_clients, plain
from sparsekit_fl.rounds import run
from sparsekit_fl.stored import SCHEMA_NUMBER
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem


@pytest.fixture(scope="module")
def finished() -> fl.RunResult:
    config = replace(tiny_config(), eval_global_every=2)
    return run(OwnModels(), tiny_problem(), tiny_clients(), config)


def test_the_three_means_of_three_clients() -> None:
    scores = [{"accuracy": (1.0, 10.0), "loss": (1.0, 10.0)}, {"accuracy": (5.0, 10.0), "loss": (8.0, 10.0)},
              {"accuracy": (80.0, 80.0), "loss": (8.0, 80.0)}]  # fmt: skip
    assert over_clients(scores) == {
        "mean": pytest.approx({"accuracy": 1.6 / 3, "loss": 1.0 / 3}),
        "weighted": pytest.approx({"accuracy": 0.86, "loss": 0.17}),
        "worst_decile": pytest.approx({"accuracy": 0.1, "loss": 0.8}),
    }


def test_the_worst_tenth_is_rounded_up_and_a_value_that_is_not_a_number_is_the_worst() -> None:
    def worst(scores: list[tuple[float, float]], *lower: str) -> float:
        return over_clients([{"accuracy": one} for one in scores], lower=frozenset(lower))["worst_decile"]["accuracy"]

    scores = [(float(k), 10.0) for k in range(11)]
    assert worst(scores) == pytest.approx((0.0 + 0.1) / 2)
    assert worst(scores[:10]) == 0.0
    assert worst(scores, "accuracy") == pytest.approx((1.0 + 0.9) / 2)
    for some in itertools.permutations([(math.nan, 1.0), (0.4, 1.0), (0.6, 1.0)]):
        for lower in ((), ("accuracy",)):
            assert math.isnan(worst([*some], *lower))
            assert math.isnan(worst([*some] * 5, *lower)), "two of 15, and five are not a number"


def test_clients_without_a_metric_do_not_count() -> None:
    scores = [{"accuracy": (1.0, 2.0)}, {}, {"accuracy": (math.nan, 0.0)}]
    assert over_clients(scores) == {kind: {"accuracy": 0.5} for kind in KINDS}
    assert math.isnan(over_clients([{"accuracy": (0.0, 0.0)}])["mean"]["accuracy"])


def test_a_metric_says_itself_whether_lower_is_better() -> None:
    def distance(outputs: Any, targets: Any) -> Any:
        return accuracy(outputs, targets)

    assert not lower_is_better("distance", distance)
    distance.lower_is_better = True  # type: ignore[attr-defined]
    assert lower_is_better("distance", distance)
    assert [lower_is_better(name) for name in ("loss", "log_loss", "mean_error", "perplexity", "f1")] == [True] * 4 + [False]


def test_a_record_comes_back_equal_and_numbers_that_json_lacks_become_null() -> None:
    record = RoundRecord(
        round=2,
        cohort=(3, 1),
        dropped=((1, "why"),),
        loss=0.1 + 0.2,
        accuracy=None,
        ratios={3: 0.5},
        cost=WorkCost(flops=2, seconds=0.1),
        seconds=0.1,
        evaluation=RoundScores(personal={"loss": 1.0}, validation={}, shared={"loss": 2.0}),
    )
    assert RoundRecord.from_dict(plain(record.to_dict())) == record
    assert {"personal", "validation", "global"} <= set(plain(record.to_dict())["evaluation"])
    assert plain({"a": [float("nan"), 1.0], "b": (float("inf"), "x")}) == {"a": [None, 1.0], "b": [None, "x"]}


def test_a_result_is_read_as_it_was_and_one_of_another_version_or_a_damaged_one_is_refused(
    finished: fl.RunResult, tmp_path: Path
) -> None:
    raw = finished.to_dict()
    deploying = tuple(replace(one, flops_deploying=7 + one.client_id) for one in finished.final.per_client)
    whole = replace(
        finished,
        final=replace(finished.final, per_client=deploying),
        cost=replace(finished.cost, flops_deploying=9, flops_scoring=3, scoring_seconds=0.1),
        note="a note", stopped="enough", fingerprint={"code": "x"},
    )  # fmt: skip
    for result in (finished, whole):
        result.save(tmp_path / "result.json")
        loaded = fl.load_result(tmp_path)
        for part in fields(result):
            if part.name != "state":
                assert getattr(loaded, part.name) == getattr(result, part.name), part.name
    for change, says in (
        ({"schema": SCHEMA_NUMBER + 1}, r"has schema 5, and this version reads 4"),
        ({"rounds": [{"round": 1}]}, "is damaged"),
    ):
        (tmp_path / "result.json").write_text(json.dumps(raw | change))
        with pytest.raises(DataError, match=says):
            fl.load_result(tmp_path)
    with pytest.raises(DataError, match="no result at"):
        fl.load_result(tmp_path / "nowhere")


def test_the_frame_of_rounds_has_every_mean_of_every_metric(finished: fl.RunResult) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed; pip install 'sparsekit-torch[report]'")
    frame = finished.to_frame()
    assert list(frame.index) == [1, 2, 3, 4]
    assert frame.loc[4, "personal_accuracy"] == finished.final.personal["accuracy"]
    assert frame.loc[4, "personal_loss_worst_decile"] == finished.final.worst_decile["personal"]["loss"]
    assert frame.loc[4, "global_accuracy_weighted"] == finished.final.weighted["global"]["accuracy"]
    assert math.isnan(frame.loc[3, "validation_accuracy"])
    assert frame.loc[4, "flops"] == finished.cost.flops
    frame = replace(finished, rounds=()).to_frame()
    assert (len(frame), frame.index.name) == (0, "round")
