"""The allocations within a budget, and those written down by hand: the contract, budgets, and what makes each its own."""

import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.allocation import (
    Allocation,
    PreferredMultiple,
    Schedule,
    allocate,
    by_cost,
    by_ratio,
    global_ranking,
    mask_from_scores,
    ratio_counts,
    uniform,
)
from sparsekit.allocation.limits import free_counts
from sparsekit.allocation.shares import check_ratio, keep_count
from sparsekit.errors import InvalidValueError, UnknownNameError
from sparsekit.graph.groups import UnitGroup
from sparsekit.testing import AllocationContract, example_graph

HALF = sk.Budget(flops="50%")
ALL = [by_cost, partial(by_cost, scale="none", width_penalty=0.0), global_ranking, uniform, partial(by_ratio, ratios=0.3)]


class TestAllocations(AllocationContract):
    @pytest.fixture(params=ALL, ids=[f"{place}" for place in range(len(ALL))])
    def allocation(self, request: pytest.FixtureRequest) -> Allocation:
        return request.param


CONVOLUTIONS, LINEAR = "convolutions", "linear"


@cache
def _traced(kind: str = CONVOLUTIONS) -> tuple[sk.UnitGraph, Any, dict[str, Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == CONVOLUTIONS:
            model = nn.Sequential(
                nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 24, 3), nn.ReLU(), nn.Conv2d(24, 16, 3), nn.ReLU(),
                nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 5),
            )  # fmt: skip
            x = torch.randn(2, 3, 8, 8)
        else:
            widths = (4, 40, 8, 30)
            layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
            model, x = nn.Sequential(*layers, nn.Linear(30, 2)), torch.randn(3, 4)
    graph = sk.trace_units(model, x)
    scores = sk.criteria.Magnitude().scores(graph, sk.ScoringContext(weights=model.state_dict()))
    return graph, sk.cost_model(model, x, graph=graph), dict(scores)


def test_global_takes_the_units_of_least_score_wherever_they_are() -> None:
    graph, costs, scores = _traced()
    scores = {name: torch.full_like(values, 10.0) for name, values in scores.items()}
    scores["2"][:6] = 1.0
    scores["7"][:3] = 2.0
    dense = {name: group.size for name, group in graph.groups.items()}
    limit = costs.costs({**dense, "2": 18, "7": 37})["flops"]
    counts = allocate(partial(global_ranking, scale="none"), graph, scores, costs, budget=sk.Budget(flops=limit))
    assert counts == {**dense, "2": 18, "7": 37}


def test_uniform_keeps_one_share_everywhere() -> None:
    graph, costs, scores = _traced()
    counts = allocate(uniform, graph, scores, costs, budget=HALF)
    ratio = max((count - 1) / graph.groups[name].size for name, count in counts.items())
    assert counts == ratio_counts(graph, ratio + 1e-6)


def test_shares_by_hand_go_by_name_before_expression() -> None:
    graph, costs, scores = _traced()
    rule = partial(by_ratio, ratios={r"\d": 0.5, "0": 0.25})
    assert allocate(rule, graph, scores, costs) == {"0": 3, "2": 12, "4": 8, "7": 20}
    assert allocate(rule, graph, scores, costs, multiple_of=4) == {"0": 4, "2": 12, "4": 8, "7": 20}
    assert ratio_counts(graph, {"0": 0.25}, default=0.5) == {"0": 3, "2": 12, "4": 8, "7": 20}
    assert ratio_counts(graph, {"[024]": 0.25, r"\d": 0.5}) == {"0": 3, "2": 6, "4": 4, "7": 20}, "earlier expressions first"


@pytest.mark.parametrize("rule", ALL[:3])
def test_no_unit_that_went_fits_back(rule: Allocation) -> None:
    graph, costs, scores = _traced()
    for share in (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        limit = share * costs.dense_costs()["flops"]
        counts = allocate(rule, graph, scores, costs, budget=sk.Budget(flops=limit))
        for name, count in counts.items():
            assert count == graph.groups[name].size or costs.costs({**counts, name: count + 1})["flops"] > limit


def test_of_two_units_of_equal_importance_the_dearer_one_goes() -> None:
    graph, costs, scores = _traced(LINEAR)
    equal = {name: torch.ones_like(values) for name, values in scores.items()}
    dense = {name: group.size for name, group in graph.groups.items()}
    saved = {name: -costs.tracker(dense).change((name,), size - 1)["flops"] for name, size in dense.items()}
    dearest = max(saved, key=lambda name: saved[name])
    limit = costs.dense_costs()["flops"] - saved[dearest]
    counts = allocate(partial(by_cost, scale="none"), graph, equal, costs, budget=sk.Budget(flops=limit))
    assert counts == {**dense, dearest: dense[dearest] - 1}


def test_a_preferred_multiple_gives_way_to_the_budget_to_limits_and_to_narrow_groups() -> None:
    graph, costs, scores = _traced(LINEAR)  # groups of 40, 8 and 30 units
    for share in (0.1, 0.3, 0.5, 0.8):
        limit = share * costs.dense_costs()["flops"]
        budget = sk.Budget(flops=limit)
        plain = costs.costs(allocate(by_cost, graph, scores, costs, budget=budget))["flops"]
        counts = allocate(by_cost, graph, scores, costs, budget=budget, multiple_of=PreferredMultiple(16))
        assert 0.98 * plain <= costs.costs(counts)["flops"] <= limit
    free = free_counts(graph, {}, PreferredMultiple())
    assert free["0",] == (16, 32, 40)
    assert free["2",] == tuple(range(1, 9)), "narrower than 16: any number"
    assert free["4",] == (16, 30)
    assert PreferredMultiple().steps == (16, 8, 4)
    limited = free_counts(graph, {"0": (0.45, 0.49)}, PreferredMultiple(8))
    assert limited["0",] == (18, 19), "no multiple is within the limits"
    with pytest.raises(sk.BudgetError):
        allocate(by_cost, graph, scores, costs, budget=sk.Budget(flops=2), multiple_of=PreferredMultiple())


def test_a_budget_that_cannot_be_met_names_the_minimum_and_what_holds_it_up() -> None:
    graph, costs, scores = _traced(LINEAR)
    told = r"is the minimum; held up by 0 \(at least 40 of 40, by limits or multiples: lower these\)"
    with pytest.raises(sk.BudgetError, match=told) as caught:
        allocate(by_cost, graph, scores, costs, budget=sk.Budget(flops="5%"), limits={"0": (1.0, 1.0)})
    assert caught.value.least["flops"] == costs.costs({"0": 40, "2": 1, "4": 1})["flops"]
    with pytest.raises(sk.BudgetError, match="every group is at its last unit"):
        allocate(by_cost, graph, scores, costs, budget=sk.Budget(flops=2))


@pytest.mark.parametrize(
    ("more", "error", "told"),
    [
        ({"limits": {"0": (0.5, 0.2)}}, InvalidValueError, "least ≤ largest"),
        *(
            ({"allocation": each, "budget": None}, InvalidValueError, "needs a budget")
            for each in (by_cost, global_ranking, uniform)
        ),
        ({"allocation": partial(by_ratio, ratios=0.9)}, sk.BudgetError, "'by_ratio' exceeds the budget: flops ≤"),
        ({"allocation": partial(by_ratio, ratios={"conv": 0.5})}, UnknownNameError, "names and matches no group"),
        ({"allocation": partial(by_ratio, ratios={"0": 50})}, InvalidValueError, "ratio must be in"),
        ({"allocation": partial(by_cost, scale="median")}, InvalidValueError, "scale must be one of"),
        ({"limits": {"00": (0.1, 0.2)}}, UnknownNameError, "names no group"),
        ({"multiple_of": {"chanel": 8}}, UnknownNameError, "did you mean 'channel'"),
    ],
)
def test_what_is_not_allowed_is_refused(more: dict[str, Any], error: type[Exception], told: str) -> None:
    graph, costs, scores = _traced(LINEAR)
    with pytest.raises(error, match=told):
        allocate(graph=graph, scores=scores, costs=costs, **{"allocation": by_cost, "budget": HALF, **more})


def test_schedules_go_from_the_dense_model_to_the_budget() -> None:
    for shape in ("one_shot", "linear", "cubic", "cosine"):
        schedule = Schedule(shape, 4)
        gone = [schedule.progress(step) for step in range(6)]
        assert gone[0] == 0
        assert gone[4] == gone[5] == 1
        assert gone == sorted(gone)
    assert Schedule("cubic", 2).progress(1) == 0.875
    with pytest.raises(UnknownNameError, match="did you mean 'cubic'"):
        Schedule("cubik")
    with pytest.raises(InvalidValueError, match="at least one step"):
        Schedule("linear", 0)


@pytest.mark.parametrize(("ratio", "size", "count"), [(0.5, 5, 3), (0.7, 10, 7), (1e-9, 10, 1), (1, 7, 7), (1 / 16, 512, 32)])
def test_the_count_is_rounded_up_and_at_least_one(ratio: float, size: int, count: int) -> None:
    assert keep_count(ratio, size) == count
    assert ratio_counts(sk.UnitGraph({"only": UnitGroup("only", size, "feature", ())}, {}), ratio) == {"only": count}


@pytest.mark.parametrize("ratio", [0, -0.5, 1.5, float("nan"), float("inf"), True, "0.5", None])
@pytest.mark.parametrize("check", [check_ratio, lambda ratio: ratio_counts(sk.UnitGraph({}, {}), ratio)])
def test_a_ratio_outside_the_range_is_refused(ratio: object, check: Callable[[object], object]) -> None:
    with pytest.raises(InvalidValueError, match=r"ratio must be in \(0, 1\], got"):
        check(ratio)


def test_groups_tied_in_a_chain_take_the_least_of_their_counts() -> None:
    groups = {name: UnitGroup(name, size, "feature", ()) for name, size in (("a", 9), ("b", 8), ("c", 6), ("d", 9))}
    graph = sk.UnitGraph(groups, {}, ties=(("a", "b"), ("b", "c")))
    assert ratio_counts(graph, 0.5) == {"a": 3, "b": 3, "c": 3, "d": 5}


SIZES = {name: group.size for name, group in example_graph().groups.items()}
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def _kept(keep: Tensor) -> list[int]:
    return [int(unit) for unit in keep.nonzero().flatten()]


@given(st.data())
def test_exactly_the_count_stays_and_whoever_stays_beats_whoever_goes(data: st.DataObject) -> None:
    values = {name: data.draw(st.lists(st.sampled_from([-1.5, -0.0, 0.0, 0.5, 2.0, float("inf")]), min_size=n, max_size=n))
              for name, n in SIZES.items()}  # fmt: skip
    counts = {name: data.draw(st.integers(1, size)) for name, size in SIZES.items()}
    dtype = data.draw(st.sampled_from(FLOATS))
    mask = mask_from_scores(example_graph(), {name: torch.tensor(v, dtype=dtype) for name, v in values.items()}, counts)
    assert mask.counts() == counts
    for name, keep in mask.items():
        order = sorted(range(SIZES[name]), key=lambda unit: (-values[name][unit], unit))
        assert _kept(keep) == sorted(order[: counts[name]])


def test_scores_that_differ_in_double_precision_only_are_told_apart() -> None:
    scores = {name: torch.ones(size, dtype=torch.float64) for name, size in SIZES.items()}
    scores["first"][5] += 1e-12
    assert _kept(mask_from_scores(example_graph(), scores, dict.fromkeys(SIZES, 1))["first"]) == [5]
