"""By-cost allocation: exact choices on small models, limits, and budgets that cannot be met."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.allocation import ByCost
from sparsekit.allocation.limits import Liked, free_counts
from sparsekit.errors import InvalidValueError, UnknownNameError


def _net() -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 8), nn.ReLU(), nn.Linear(8, 30), nn.ReLU(), nn.Linear(30, 2))
    return net, torch.randn(3, 4)


@cache
def _traced() -> tuple[sk.UnitGraph, Any, dict[str, Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = _net()
    graph = sk.trace_units(model, x)
    scores = sk.criteria.Magnitude().scores(graph, sk.View(weights=model.state_dict()))
    return graph, sk.cost_model(model, x, graph=graph), dict(scores)


def _setup() -> tuple[sk.UnitGraph, Any, dict[str, Tensor]]:
    graph, costs, scores = _traced()
    return graph, costs, dict(scores)


def test_of_two_units_of_equal_worth_the_dearer_one_goes() -> None:
    graph, costs, scores = _setup()
    equal = {name: torch.ones_like(values) for name, values in scores.items()}
    dense = {name: group.size for name, group in graph.groups.items()}
    saved = {name: -costs.tracker(dense).change((name,), size - 1)["flops"] for name, size in dense.items()}
    dearest = max(saved, key=lambda name: saved[name])
    limit = costs.dense_costs()["flops"] - saved[dearest]
    counts = ByCost(sk.Budget(flops=limit), scale="none").counts(graph, equal, costs)
    assert counts == {**dense, dearest: dense[dearest] - 1}


def test_what_one_dear_unit_leaves_of_the_budget_is_spent_on_others() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 10, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(10, 20, 5), nn.ReLU(), nn.Flatten(),
                              nn.Linear(20 * 64, 10))  # fmt: skip
    x = torch.randn(1, 1, 28, 28)
    graph = sk.trace_units(model, x)
    costs = sk.cost_model(model, x, graph=graph)
    scores = sk.criteria.Magnitude().scores(graph, sk.View(weights=model.state_dict()))
    for share in (0.75, 0.5, 0.25, 0.12):
        counts = ByCost(sk.Budget(flops=f"{100 * share}%"), scale="none").counts(graph, scores, costs)
        assert 0.95 * share <= costs.costs(counts)["flops"] / costs.dense_costs()["flops"] <= share


def test_limits_and_multiples_hold_and_do_not_break_the_budget() -> None:
    graph, costs, scores = _setup()
    limits = {"0": (0.5, 0.8), "2": (1.0, 1.0)}
    counts = ByCost(sk.Budget(flops="50%"), limits=limits, multiple_of=4).counts(graph, scores, costs)
    assert 20 <= counts["0"] <= 32
    assert counts["2"] == 8
    assert all(count % 4 == 0 or count == graph.groups[name].size for name, count in counts.items())
    assert costs.costs(counts)["flops"] <= 0.5 * costs.dense_costs()["flops"]


def test_what_a_device_likes_gives_way_to_the_budget_to_limits_and_to_narrow_groups() -> None:
    graph, costs, scores = _setup()  # groups of 40, 8 and 30 units
    for share in (0.1, 0.3, 0.5, 0.8):
        limit = share * costs.dense_costs()["flops"]
        budget = sk.Budget(flops=limit)
        plain = costs.costs(ByCost(budget).counts(graph, scores, costs))["flops"]
        counts = ByCost(budget, multiple_of=Liked(16)).counts(graph, scores, costs)
        assert 0.98 * plain <= costs.costs(counts)["flops"] <= limit
    free = free_counts(graph, {}, Liked(16))
    assert {groups[0]: counts for groups, counts in free.items()} == {"0": (16, 32, 40), "2": tuple(range(1, 9)), "4": (16, 30)}
    limited = free_counts(graph, {"0": (0.45, 0.7)}, Liked(16))
    assert limited["0",] == tuple(range(18, 29)), "no multiple is within the limits"
    with pytest.raises(sk.BudgetError):
        ByCost(sk.Budget(flops=2), multiple_of=Liked(16)).counts(graph, scores, costs)


def test_a_budget_that_cannot_be_met_names_the_least_and_what_holds_it_up() -> None:
    graph, costs, scores = _setup()
    with pytest.raises(sk.BudgetError, match=r"is the least; held up by 0 \(at least 40 of 40\)") as caught:
        ByCost(sk.Budget(flops="5%"), limits={"0": (1.0, 1.0)}).counts(graph, scores, costs)
    assert caught.value.least["flops"] == costs.costs({"0": 40, "2": 1, "4": 1})["flops"]
    with pytest.raises(sk.BudgetError, match="every group is at its last unit"):
        ByCost(sk.Budget(flops=2)).counts(graph, scores, costs)


@pytest.mark.parametrize(
    ("more", "error", "told"),
    [
        ({"limits": {"0": (0.5, 0.2)}}, InvalidValueError, "least ≤ largest"),
        ({"limits": {"0": 0.5}}, InvalidValueError, "must be .least, largest. share"),
        ({"multiple_of": 0}, InvalidValueError, "positive integer"),
        ({"scale": "median"}, InvalidValueError, "scale must be one of"),
        ({"limits": {"00": (0.1, 0.2)}}, UnknownNameError, "names no group"),
        ({"multiple_of": {"chanel": 8}}, UnknownNameError, "did you mean 'channel'"),
    ],
)
def test_what_is_not_allowed_is_refused(more: dict[str, Any], error: type[Exception], told: str) -> None:
    graph, costs, scores = _setup()
    with pytest.raises(error, match=told):
        ByCost(sk.Budget(flops="50%"), **more).counts(graph, scores, costs)


def test_schedules_go_from_the_dense_model_to_the_budget() -> None:
    for shape in ("one_shot", "linear", "cubic", "cosine"):
        schedule = sk.allocation.Schedule(shape, 4)
        gone = [schedule.progress(step) for step in range(6)]
        assert gone[0] == 0
        assert gone[4] == gone[5] == 1
        assert gone == sorted(gone)
    assert sk.allocation.Schedule("linear", 4).ratio(2, 0.5) == 0.75
    assert sk.allocation.Schedule("cubic", 2).progress(1) == 0.875
    with pytest.raises(UnknownNameError, match="did you mean 'cubic'"):
        sk.allocation.Schedule("cubik")
    with pytest.raises(InvalidValueError, match="at least one step"):
        sk.allocation.Schedule("linear", 0)


def test_with_a_rise_units_of_equal_worth_go_from_every_group() -> None:
    """By cost alone the dearer of two groups is emptied first; with a rise its last units are worth more."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 1), nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 8))
        x = torch.randn(2, 20)
    graph = sk.trace_units(model, x)
    costs = sk.cost_model(model, x, graph=graph)
    scores = {name: torch.ones(group.size) for name, group in graph.groups.items()}
    plain, risen = (
        ByCost(sk.Budget(params="40%"), scale="none", thin_layer_power=rise).counts(graph, scores, costs) for rise in (0.0, 2.0)
    )
    assert plain["0"] < 10
    assert plain["3"] > 30
    assert risen["0"] > plain["0"]
    assert plain["3"] > risen["3"]
    with pytest.raises(InvalidValueError, match=r"thin_layer_power must be a finite number >= 0, got -1"):
        ByCost(sk.Budget(params="40%"), thin_layer_power=-1.0)
