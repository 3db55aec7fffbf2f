"""Results: means over clients, JSON that every reader accepts, typed loading, and frames."""

import json
import math
from dataclasses import fields, replace

import pytest
from own_models import OwnModels

import sparsekit_fl as fl
from sparsekit.errors import DataError
from sparsekit_fl.problem.metrics import accuracy, lower_is_better
from sparsekit_fl.results import ClientScores, RoundScores
from sparsekit_fl.rounds import run
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem


@pytest.fixture(scope="module")
def finished():
    config = replace(tiny_config(), eval_global_every=2)
    return run(OwnModels(), tiny_problem(), tiny_clients(), config)


def test_a_mean_is_over_the_clients_that_have_the_metric_each_counted_alike():
    sent = [{"accuracy": (1.0, 10.0), "loss": (1.0, 10.0)}, {"accuracy": (80.0, 80.0), "loss": (8.0, 80.0)},
            {"loss": (8.0, 10.0), "accuracy": (math.nan, 0.0)}, {"accuracy": (0.0, 0.0)}]  # fmt: skip
    evaluations = [fl.Evaluation(client_id=id, examples=9, personal=scores) for id, scores in enumerate(sent)]
    scores = RoundScores.of([ClientScores.read(one, {"accuracy", "loss"}) for one in evaluations], lower={"loss"})
    assert scores.personal == pytest.approx({"accuracy": 1.1 / 2, "loss": 1.0 / 3})
    assert (scores.validation, scores.shared) == ({}, None)
    assert scores.worst_decile == {"personal": pytest.approx({"accuracy": 0.1, "loss": 0.8})}


def test_the_worst_tenth_is_rounded_up_and_what_is_not_a_number_is_worst():
    clients = [ClientScores(id=at, examples=1, personal={"accuracy": at / 20, "loss": at}) for at in range(11)]
    worst = RoundScores.of(clients, lower={"loss"}).worst_decile["personal"]
    assert worst == pytest.approx({"accuracy": 0.5 / 20, "loss": 9.5})
    lost = replace(clients[5], personal={"accuracy": math.nan, "loss": math.nan})
    worst = RoundScores.of([*clients[:5], lost], lower={"loss"}).worst_decile["personal"]
    assert [math.isnan(worst[name]) for name in ("accuracy", "loss")] == [True, True]


def test_a_metric_says_itself_whether_lower_is_better():
    def distance(outputs, targets):
        return accuracy(outputs, targets)

    assert not lower_is_better("distance", distance)
    distance.lower_is_better = True
    assert lower_is_better("distance", distance)
    assert [lower_is_better(name) for name in ("loss", "log_loss", "mean_error", "perplexity", "f1")] == [True] * 4 + [False]


def test_a_result_is_read_as_it_was_and_one_of_another_version_or_a_damaged_one_is_refused(finished, tmp_path):
    raw = finished.to_dict()
    one, first = raw["final"]["per_client"][0], finished.final.per_client[0]
    assert raw["final"]["primary_metric"] == "accuracy"
    assert (one["id"], one["global"], one["ratio"]) == (first.id, first.shared, first.ratio)
    cost = replace(finished.cost, flops_scoring=3, simulated_seconds_scoring=0.1)
    whole = replace(
        finished, cost=cost, note="a note", stopped="enough", experiment={"dataset": "tiny"},
        rounds=(*finished.rounds, replace(finished.rounds[0], dropped=((1, "why"),), cost=cost, loss=None)),
    )  # fmt: skip
    for result in (finished, whole):
        result.save(tmp_path / "result.json")
        loaded = fl.load_result(tmp_path)
        for part in fields(result):
            if part.name != "state":
                assert getattr(loaded, part.name) == getattr(result, part.name), part.name
    diverged = replace(finished, final=replace(finished.final, personal={"loss": math.nan, "accuracy": math.inf}))
    assert diverged.to_dict()["final"]["personal"] == {"loss": None, "accuracy": None}, "JSON has no such number"
    diverged.save(tmp_path / "result.json")
    assert math.isnan(fl.load_result(tmp_path).final.personal["loss"])
    for change, says in (
        ({"schema": 4}, r"has schema 4, and this version reads 6"),
        ({"rounds": [{"round": 1}]}, "is damaged"),
    ):
        (tmp_path / "result.json").write_text(json.dumps(raw | change))
        with pytest.raises(DataError, match=says):
            fl.load_result(tmp_path)
    with pytest.raises(DataError, match="nowhere is not a result"):
        fl.load_result(tmp_path / "nowhere")


def test_the_frame_of_rounds_has_every_mean_of_every_metric(finished):
    pytest.importorskip("pandas", reason="pandas is not installed; pip install '.[report]'")
    frame = finished.to_frame()
    assert list(frame.index) == [1, 2, 3, 4]
    assert frame.loc[4, "personal_accuracy"] == finished.final.personal["accuracy"]
    assert frame.loc[4, "global_loss"] == finished.final.shared["loss"]
    assert frame.loc[4, "personal_accuracy_worst_decile"] == finished.final.worst_decile["personal"]["accuracy"]
    assert math.isnan(frame.loc[3, "validation_accuracy"])
    assert frame.loc[4, "flops"] == finished.cost.flops
    frame = replace(finished, rounds=()).to_frame()
    assert (len(frame), frame.index.name) == (0, "round")
