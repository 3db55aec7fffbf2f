"""Passes by which a method decides while it trains are in FLOPs and simulated seconds, and training alone stands beside."""

from __future__ import annotations

import math

import pytest

import sparsekit_fl as fl
from sparsekit_fl.methods import registry
from sparsekit_fl.methods.make import make_method
from sparsekit_fl.methods.per_fedavg import AdaptedModel
from sparsekit_fl.results.part import Cost
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem

DENSE = 2 * (6 * 8 + 8 * 3)  # of one example of the tiny model
UNIT = 2 * (6 + 3)  # of one example and one of its eight units
BEST = {"personal": "LocalModel", "personal.select": "best"}
SCORES = {
    "fedlps", "fedlps-magnitude", "fedlps-ordered", "fedlps-own", "fedlps-paper", "fedlps-random", "flst",
    "hermes", "lotteryfl", "p-ucbv-dyn", "p-ucbv-fix", "rcr-dyn", "rcr-fix",
}  # fmt: skip


def cost(method, *, rounds=1, **options):
    settings = options.pop("settings", {})
    made = make_method(method, settings=settings)
    return fl.run(made, tiny_problem(), tiny_clients(), tiny_config(rounds=rounds), **options)


def examples_of(record, *splits):
    return {c.id: sum(len(getattr(c.data, split)) for split in splits) for c in tiny_clients() if c.id in record.cohort}


def first_scores(record):
    """Training examples that cost a hundredth of the work of two epochs."""
    return {id: max(1, 3 * 2 * count // 100) for id, count in examples_of(record, "train").items()}


def scored_to_choose(record, first=False):
    """Validation data, and of the training data what a twentieth of the work of two epochs leaves for them."""
    val, train = examples_of(record, "val"), examples_of(record, "train")
    before = first_scores(record) if first else dict.fromkeys(val, 0)
    return {id: val[id] + max(0, int(0.05 * 3 * 2 * train[id]) - val[id] - before[id]) for id in val}


def test_choosing_the_best_model_costs_a_twentieth_of_the_training():
    result = cost("fedavg", settings=BEST)
    assert 0 < result.cost.flops_scoring <= 0.05 * result.cost.flops_compact_training
    assert result.cost.flops_scoring == sum(scored_to_choose(result.rounds[0]).values()) * DENSE
    assert result.cost.flops_compact_training == cost("fedavg").cost.flops_compact
    assert result.cost.flops_compact == result.cost.flops_compact_training + result.cost.flops_scoring == result.cost.flops
    assert result.cost.flops_rowmask == cost("fedavg").cost.flops_rowmask, "the paper's count is of training alone"
    assert Cost.of(result.cost).work() == result.cost


def test_fedlps_scores_the_first_model_once_and_each_trained_one_at_its_own_width():
    record = cost("fedlps").rounds[0]
    train, chosen = examples_of(record, "train"), scored_to_choose(record, first=True)
    units = {client: max(1, math.ceil(8 * ratio)) for client, ratio in record.ratios.items()}
    first = first_scores(record)  # for the accuracy before the first round, from which bandits learn
    assert record.cost.flops_scoring == sum((first[client] + chosen[client]) * units[client] * UNIT for client in chosen)
    assert record.cost.flops_compact_training == sum(3 * 2 * train[client] * units[client] * UNIT for client in train)


@pytest.mark.parametrize("method", ["hermes", "lotteryfl"])
def test_asking_whether_to_prune_costs_a_pass_over_validation_data(method):
    record = cost(method).rounds[0]
    assert record.cost.flops_scoring == sum(examples_of(record, "val").values()) * DENSE


@pytest.mark.parametrize("method", sorted(SCORES - {"hermes", "lotteryfl"}))
def test_variants_of_fedlps_score_for_a_twentieth_of_their_training_and_in_their_own_width(method):
    for rounds in (1, 5):
        paid = cost(method, rounds=rounds).cost
        assert 0 < paid.flops_scoring <= 0.05 * paid.flops_compact_training


@pytest.mark.slow
def test_methods_that_score_while_they_train_are_those_of_the_documentation():
    found = {name for name in registry if cost(name).cost.flops_scoring}
    assert found == SCORES


@pytest.mark.parametrize("engine", [None, fl.Embedded(workers=2)])
def test_scoring_takes_simulated_seconds_and_the_number_without_stands_beside(engine):
    result = cost("fedavg", settings=BEST, engine=engine)
    plain, record = cost("fedavg"), result.rounds[0]
    assert result.cost.seconds == pytest.approx(plain.cost.seconds, rel=0.01), "but for the bytes of the number itself"
    assert result.cost.scoring_seconds > 0
    assert record.seconds == result.cost.simulated_seconds == result.cost.seconds + result.cost.scoring_seconds
    written = Cost.of(result.cost).to_dict()
    assert written["simulated_seconds"] == result.cost.simulated_seconds
    assert written["simulated_seconds_training"] == result.cost.seconds
    assert not {"simulated_seconds_training", "simulated_seconds_scoring"} & set(Cost.of(plain.cost).to_dict())
    assert Cost.from_dict(written).work() == result.cost


def test_a_step_of_adaptation_is_counted_once_for_each_client_and_in_no_total():
    result = cost("per-fedavg")
    steps = sum(min(AdaptedModel().largest_batch, len(client.data.train)) for client in tiny_clients())
    assert result.cost.flops_deploying == steps * 3 * DENSE
    assert result.rounds[-1].cost.flops_deploying == 0
    assert result.cost.flops_compact == result.rounds[-1].cost.flops_compact
    assert Cost.of(result.cost).to_dict()["flops_deploying"] == result.cost.flops_deploying
    assert Cost.of(result.cost).work() == result.cost


@pytest.mark.parametrize("engine", [None, fl.Embedded(workers=2)])
def test_batch_norm_statistics_of_what_is_deployed_cost_a_pass_over_training_data(engine):
    whole = sum(len(client.data.train) for client in tiny_clients()) * DENSE
    assert cost("heterofl", engine=engine).cost.flops_deploying == whole
    assert 0 < cost("fjord", engine=engine).cost.flops_deploying < whole, "each client deploys the width that it can run"


@pytest.mark.slow
def test_methods_that_run_something_to_deploy_are_those_of_the_documentation():
    found = {name for name in registry if cost(name).cost.flops_deploying}
    assert found == {
        "per-fedavg", "heterofl", "fedrolex", "efd", "fjord", "fedmp", "hermes", "lotteryfl", "fedspa",
    }  # fmt: skip
