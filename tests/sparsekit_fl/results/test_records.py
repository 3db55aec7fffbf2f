"""Means over clients, and JSON that every reader accepts."""

from __future__ import annotations

import math

from sparsekit_fl.client.messages import Evaluation, WorkCost
from sparsekit_fl.results.part import plain
from sparsekit_fl.results.rounds import RoundRecord
from sparsekit_fl.results.scores import RoundScores, mean_scores


def test_the_mean_is_over_clients_and_not_over_examples():
    scores = [{"accuracy": (1.0, 2.0)}, {"accuracy": (10.0, 10.0)}, {}, {"accuracy": (0.0, 0.0)}]
    assert mean_scores(scores) == {"accuracy": 0.75}
    assert math.isnan(mean_scores([{"accuracy": (0.0, 0.0)}])["accuracy"])


def test_numbers_that_json_lacks_become_null():
    assert plain({"a": [float("nan"), 1.0], "b": (float("inf"), "x")}) == {"a": [None, 1.0], "b": [None, "x"]}


def test_a_record_comes_back_equal():
    record = RoundRecord(
        round=2,
        cohort=(3, 1),
        dropped=((1, "why"),),
        loss=0.1 + 0.2,
        accuracy=None,
        ratios={3: 0.5},
        cost=WorkCost(flops_compact=2, seconds=0.1),
        seconds=0.1,
        evaluation=RoundScores(personal={"loss": 1.0}, validation={}, shared={"loss": 2.0}),
    )
    assert RoundRecord.from_dict(plain(record.to_dict())) == record
    assert set(plain(record.to_dict())["evaluation"]) == {"personal", "validation", "global"}


def test_scores_of_a_sample_say_of_how_many_clients_they_are():
    evaluations = [Evaluation(client_id=id, examples=2, personal={"accuracy": (1.0, 2.0)}) for id in (4, 7)]
    scores = RoundScores.of(evaluations, sampled=True)
    assert scores.to_dict()["clients"] == 2
    assert RoundScores.from_dict(scores.to_dict()) == scores
    assert RoundScores.of(evaluations).clients is None
