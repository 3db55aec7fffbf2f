"""Results: scores over clients, typed loading, frames, plots and the JSON schema."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sparsekit_fl as fl
from sparsekit.errors import DataError
from sparsekit_fl.client.messages import Evaluation
from sparsekit_fl.methods import fedavg
from sparsekit_fl.policies.personal import LocalModel
from sparsekit_fl.problem.metrics import accuracy, lower_is_better
from sparsekit_fl.results.read import SCHEMA_NUMBER
from sparsekit_fl.results.records import json_schema
from sparsekit_fl.results.scores import RoundScores, mean_scores, weighted_scores, worst_scores
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem

ROOT = Path(__file__).parents[3]


def tiny_run(**options: Any) -> fl.RunResult:
    config = replace(tiny_config(), eval_global_every=2)
    return run(replace(fedavg(), personal=LocalModel()), tiny_problem(), tiny_clients(), config, **options)


def test_the_three_means_of_three_clients() -> None:
    scores = [{"accuracy": (1.0, 10.0), "loss": (1.0, 10.0)}, {"accuracy": (5.0, 10.0), "loss": (8.0, 10.0)},
              {"accuracy": (80.0, 80.0), "loss": (8.0, 80.0)}]  # fmt: skip
    assert mean_scores(scores) == pytest.approx({"accuracy": 1.6 / 3, "loss": 1.0 / 3})
    assert weighted_scores(scores) == pytest.approx({"accuracy": 0.86, "loss": 0.17})
    assert worst_scores(scores) == pytest.approx({"accuracy": 0.1, "loss": 0.8})


def test_the_worst_tenth_is_rounded_up() -> None:
    scores = [{"accuracy": (float(k), 10.0)} for k in range(11)]
    assert worst_scores(scores)["accuracy"] == pytest.approx((0.0 + 0.1) / 2)
    assert worst_scores(scores[:10])["accuracy"] == 0.0
    assert worst_scores(scores, lower=frozenset({"accuracy"}))["accuracy"] == pytest.approx((1.0 + 0.9) / 2)


def test_clients_without_a_metric_do_not_count() -> None:
    scores = RoundScores.of([Evaluation(client_id=0, examples=2, personal={"accuracy": (1.0, 2.0)}),
                             Evaluation(client_id=1, examples=2, personal={"accuracy": (0.0, 0.0)})])  # fmt: skip
    assert scores.personal["accuracy"] == scores.worst["personal"]["accuracy"] == 0.5


def test_a_metric_says_itself_whether_lower_is_better() -> None:
    def distance(outputs: Any, targets: Any) -> Any:
        return accuracy(outputs, targets)

    assert not lower_is_better("distance", distance)
    distance.lower_is_better = True  # type: ignore[attr-defined]
    assert lower_is_better("distance", distance)
    assert [lower_is_better(name) for name in ("loss", "log_loss", "mean_error", "perplexity", "f1")] == [True] * 4 + [False]


def test_a_result_of_another_version_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    raw = tiny_run().to_dict()
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**raw, "schema": SCHEMA_NUMBER + 1}))
    with pytest.raises(DataError, match=r"has schema 4, and this version reads 3"):
        fl.load_result(tmp_path)
    path.write_text(json.dumps({**raw, "rounds": [{"round": 1}]}))
    with pytest.raises(DataError, match="is damaged"):
        fl.load_result(tmp_path)
    with pytest.raises(DataError, match="no result at"):
        fl.load_result(tmp_path / "nowhere")


def test_the_frame_of_rounds_has_every_mean_of_every_metric() -> None:
    pytest.importorskip("pandas", reason="pandas is not installed; pip install 'sparsekit-torch[report]'")
    result = tiny_run()
    frame = result.to_frame()
    assert list(frame.index) == [1, 2, 3, 4]
    assert frame.loc[4, "personal_accuracy"] == result.final.personal["accuracy"]
    assert frame.loc[4, "personal_loss_worst"] == result.final.worst["personal"]["loss"]
    assert frame.loc[4, "global_accuracy_weighted"] == result.final.weighted["global"]["accuracy"]
    assert math.isnan(frame.loc[3, "validation_accuracy"])
    assert frame.loc[4, "flops_compact"] == result.cost.flops_compact


def test_the_frame_of_clients_has_a_row_for_each() -> None:
    pytest.importorskip("pandas", reason="pandas is not installed; pip install 'sparsekit-torch[report]'")
    result = tiny_run()
    frame = result.clients_frame()
    assert list(frame.index) == list(range(8))
    assert frame["personal_accuracy"].mean() == pytest.approx(result.final.personal["accuracy"])
    assert frame["trained"].sum() == sum(len(record.ratios) for record in result.rounds)
    assert {"examples", "validation_loss", "global_loss", "dropped", "reason"} <= set(frame.columns)


def test_the_schema_in_the_documentation_is_that_of_the_code() -> None:
    # To write it: python -c "import json; from sparsekit_fl.results.records import json_schema as schema;
    # print(json.dumps(schema(), indent=1, ensure_ascii=False))" > docs/result.schema.json
    assert json.loads((ROOT / "docs/result.schema.json").read_text()) == json_schema()


def test_results_keep_to_the_schema() -> None:
    validators = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    raw = tiny_run().to_dict()
    validators.Draft202012Validator.check_schema(json_schema())
    validators.validate(raw, json_schema())
    with pytest.raises(validators.ValidationError):
        validators.validate({**raw, "schema": 1}, json_schema())
