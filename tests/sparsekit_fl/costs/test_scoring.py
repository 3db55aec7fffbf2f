"""Passes by which a method decides while it trains are counted, and apart from training."""

from __future__ import annotations

import pytest

from sparsekit_fl.costs.clock import round_cost, scoring_seconds
from sparsekit_fl.engines.embedded import Embedded
from sparsekit_fl.methods.make import make_method
from sparsekit_fl.problem.clients import Capability
from sparsekit_fl.results.rounds import cost_dict, cost_from
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing.tiny import tiny_clients, tiny_config, tiny_problem
from sparsekit_fl.wire.messages import WorkCost

DENSE = 2 * (6 * 8 + 8 * 3)  # of one example of the tiny model


def cost(method, **options):
    settings = options.pop("settings", {})
    made = make_method(method, settings=settings)
    return run(made, tiny_problem(), tiny_clients(), tiny_config(rounds=1), **options)


def test_choosing_the_best_model_costs_a_pass_over_validation_and_training_data():
    result = cost("fedavg", settings={"personal": "LocalModel", "personal.select": "best"})
    cohort = result.rounds[0].cohort
    examples = sum(len(client.data.val) + len(client.data.train) for client in tiny_clients() if client.id in cohort)
    assert result.cost.flops_scoring == pytest.approx(examples * DENSE, rel=0.2)
    assert result.cost.flops_compact == cost("fedavg").cost.flops_compact
    assert cost_from(cost_dict(result.cost)) == result.cost


@pytest.mark.parametrize(("method", "scores"), [("fedavg", False), ("hermes", True), ("lotteryfl", True), ("fedlps", True)])
def test_methods_that_decide_by_scores_say_what_that_took(method, scores):
    result = cost(method)
    assert (result.cost.flops_scoring > 0) is scores
    assert ("flops_scoring" in cost_dict(result.cost)) is scores
    assert cost(method, engine=Embedded(workers=2)).cost.flops_scoring == result.cost.flops_scoring


@pytest.mark.parametrize("engine", [None, Embedded(workers=2)])
def test_scoring_takes_simulated_seconds_and_the_number_without_stands_beside(engine):
    result = cost("fedavg", settings={"personal": "LocalModel", "personal.select": "best"}, engine=engine)
    plain, record = cost("fedavg"), result.rounds[0]
    assert result.cost.seconds == pytest.approx(plain.cost.seconds, rel=0.01), "but for the bytes of the number itself"
    assert result.cost.scoring_seconds > 0
    assert record.seconds == result.cost.simulated_seconds == result.cost.seconds + result.cost.scoring_seconds
    written = cost_dict(result.cost)
    assert written["simulated_seconds"] == result.cost.simulated_seconds
    assert written["simulated_seconds_training"] == result.cost.seconds
    assert not {"simulated_seconds_training", "simulated_seconds_scoring"} & set(cost_dict(plain.cost))
    assert cost_from(written) == result.cost


def test_a_round_lasts_until_the_slowest_has_trained_and_scored():
    slow = WorkCost(seconds=5.0, scoring_seconds=0.5)
    scores = WorkCost(seconds=4.0, scoring_seconds=3.0)
    together = round_cost([slow, scores], wall_seconds=0.0)
    assert (together.seconds, together.simulated_seconds) == (5.0, 7.0)
    assert scoring_seconds(WorkCost(flops_scoring=10), Capability(flops_per_second=4.0)) == 2.5
