"""The allocations within a budget, and those written down by hand: the contract, budgets, and what makes each its own."""

import itertools
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.allocation import (
    ByCost,
    CostModel,
    Global,
    Isomorphic,
    Knapsack,
    PerGroup,
    Schedule,
    Sensitivity,
    Uniform,
    UniformWithin,
)
from sparsekit.allocation.limits import Liked, free_counts
from sparsekit.errors import InvalidValueError, UnknownNameError
from sparsekit.measure import cost as cost_module
from sparsekit.testing.allocations import AllocationContract, example_tied_graph

HALF = sk.Budget(flops="50%")
TABLE = {
    "first": [(0.5, 0.1), (0.25, 0.5)],
    "lower": [(0.5, 0.3), (0.25, 0.2)],
    "second": [(1.0, 0.0)],
}
WITHIN = [
    ByCost(HALF),
    ByCost(sk.Budget(params="60%", bytes=250), limits={"first": (0.5, 0.9)}, multiple_of={"feature": 2}, scale="mean"),
    Global(HALF),
    Global(sk.Budget(params="60%", bytes=250), limits={"first": (0.5, 0.9)}, multiple_of={"feature": 2}, scale="none"),
    Isomorphic(HALF),
    Knapsack(HALF),
    Knapsack(HALF, multiple_of=3),
    Sensitivity(HALF, TABLE),
    UniformWithin(HALF),
    UniformWithin(sk.Budget(bytes="70%"), multiple_of=4),
]


class TestWithinABudget(AllocationContract):
    @pytest.fixture
    def cost(self) -> CostModel:
        graph = example_tied_graph()
        terms = tuple(cost_module.CostTerm(name, Fraction(1), None) for name in graph.shapes)
        return cost_module.CostModel(graph, terms, 0, 1, frozenset(graph.shapes), dict.fromkeys(graph.shapes, 4))

    @pytest.fixture(params=WITHIN, ids=lambda allocation: type(allocation).__name__)
    def allocation(self, request: pytest.FixtureRequest) -> Any:
        return request.param


class TestByShares(AllocationContract):
    @pytest.fixture(params=[Uniform(0.3), PerGroup({"first": 0.5, "low.*": 0.25}, default=0.75, multiple_of=2)], ids=repr)
    def allocation(self, request: pytest.FixtureRequest) -> Any:
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
    scores = sk.criteria.Magnitude().scores(graph, sk.View(weights=model.state_dict()))
    return graph, sk.cost_model(model, x, graph=graph), dict(scores)


def test_global_takes_the_units_of_least_score_wherever_they_are() -> None:
    graph, costs, scores = _traced()
    scores = {name: torch.full_like(values, 10.0) for name, values in scores.items()}
    scores["2"][:6] = 1.0
    scores["7"][:3] = 2.0
    dense = {name: group.size for name, group in graph.groups.items()}
    limit = costs.costs({**dense, "2": 18, "7": 37})["flops"]
    counts = Global(sk.Budget(flops=limit), scale="none").counts(graph, scores, costs)
    assert counts == {**dense, "2": 18, "7": 37}


def test_uniform_within_keeps_one_share_everywhere() -> None:
    graph, costs, scores = _traced()
    counts = UniformWithin(HALF).counts(graph, scores, costs)
    ratio = max((count - 1) / graph.groups[name].size for name, count in counts.items())
    assert counts == Uniform(ratio + 1e-6).counts(graph, scores)


def test_isomorphic_never_compares_scores_of_different_structures() -> None:
    graph, costs, scores = _traced()
    allocation = Isomorphic(HALF, scale="none")
    louder = {name: values * (1000.0 if name == "7" else 1.0) for name, values in scores.items()}
    assert allocation.counts(graph, louder, costs) == allocation.counts(graph, scores, costs)
    louder = {name: values * (1000.0 if name == "0" else 1.0) for name, values in scores.items()}
    counts = allocation.counts(graph, louder, costs)
    assert counts["0"] == 12, "convolutions 0 and 2 have one structure, so the louder one keeps everything"
    assert counts["2"] < 24


class Branches(nn.Module):
    """Branches whose units cost differently, and the same whatever the others keep."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(inputs, 5) for inputs in (11, 7, 3))
        self.downs = nn.ModuleList(nn.Linear(5, 2, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.ups, self.downs, x.split((11, 7, 3), 1), strict=True)
        return torch.stack([down(up(part).relu()) for up, down, part in parts]).sum(0)


@pytest.mark.parametrize("share", [0.35, 0.5, 0.65])
def test_a_knapsack_is_worth_what_the_best_numbers_are(share: float) -> None:
    model, x = Branches(), torch.randn(2, 21)
    graph = sk.trace_units(model, x)
    costs = sk.cost_model(model, x, graph=graph)
    limit = share * costs.costs(dict.fromkeys(graph.groups, 5))["params"]
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        scores = {name: torch.rand(5, generator=generator).double() for name in graph.groups}
        worth = {name: each.sort(descending=True).values for name, each in scores.items()}

        def kept(counts: Any, worth: Any = worth) -> float:
            return float(sum(worth[name][:count].sum() for name, count in counts.items()))

        every = (dict(zip(worth, counts, strict=True)) for counts in itertools.product(range(1, 6), repeat=3))
        best = max(kept(counts) for counts in every if costs.costs(counts)["params"] <= limit)
        found = Knapsack(sk.Budget(params=limit), scale="none").counts(graph, scores, costs)
        assert costs.costs(found)["params"] <= limit
        assert kept(found) == pytest.approx(best)


def test_a_knapsack_fills_what_the_choices_of_large_groups_leave() -> None:
    graph, costs, scores = _traced(LINEAR)  # a group of 40 units has more numbers than choices
    counts = Knapsack(HALF).counts(graph, scores, costs)
    assert 0.98 < costs.costs(counts)["flops"] / (0.5 * costs.dense_costs()["flops"]) <= 1


def test_sensitivity_spares_the_group_that_hurts() -> None:
    graph, costs, scores = _traced()
    calm = [(0.75, 0.01), (0.5, 0.02), (0.25, 0.03)]
    table = dict.fromkeys(graph.groups, calm) | {"2": [(0.75, 0.5), (0.5, 0.4)]}
    counts = Sensitivity(sk.Budget(flops="60%"), table).counts(graph, scores, costs)
    shares = {name: count / graph.groups[name].size for name, count in counts.items()}
    assert shares["2"] > max(shares[name] for name in ("0", "4"))
    with pytest.raises(InvalidValueError, match="no entry for group '0'"):
        Sensitivity(HALF, {"2": calm}).counts(graph, scores, costs)
    with pytest.raises(InvalidValueError, match="pairs"):
        Sensitivity(HALF, {"2": [(2.0, 0.1)]})


def test_shares_by_hand_go_by_name_before_expression() -> None:
    graph, _, scores = _traced()
    counts = PerGroup({r"\d": 0.5, "0": 0.25}).counts(graph, scores)
    assert counts == {"0": 3, "2": 12, "4": 8, "7": 20}
    with pytest.raises(UnknownNameError, match="names and matches no group"):
        PerGroup({"conv": 0.5}).counts(graph, scores)
    with pytest.raises(InvalidValueError, match="ratio must be in"):
        PerGroup({"0": 50})


def test_of_two_units_of_equal_worth_the_dearer_one_goes() -> None:
    graph, costs, scores = _traced(LINEAR)
    equal = {name: torch.ones_like(values) for name, values in scores.items()}
    dense = {name: group.size for name, group in graph.groups.items()}
    saved = {name: -costs.tracker(dense).change((name,), size - 1)["flops"] for name, size in dense.items()}
    dearest = max(saved, key=lambda name: saved[name])
    limit = costs.dense_costs()["flops"] - saved[dearest]
    counts = ByCost(sk.Budget(flops=limit), scale="none").counts(graph, equal, costs)
    assert counts == {**dense, dearest: dense[dearest] - 1}


def test_what_a_device_likes_gives_way_to_the_budget_to_limits_and_to_narrow_groups() -> None:
    graph, costs, scores = _traced(LINEAR)  # groups of 40, 8 and 30 units
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
    graph, costs, scores = _traced(LINEAR)
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
    graph, costs, scores = _traced(LINEAR)
    with pytest.raises(error, match=told):
        ByCost(sk.Budget(flops="50%"), **more).counts(graph, scores, costs)


def test_schedules_go_from_the_dense_model_to_the_budget() -> None:
    for shape in ("one_shot", "linear", "cubic", "cosine"):
        schedule = Schedule(shape, 4)
        gone = [schedule.progress(step) for step in range(6)]
        assert gone[0] == 0
        assert gone[4] == gone[5] == 1
        assert gone == sorted(gone)
    assert Schedule("linear", 4).ratio(2, 0.5) == 0.75
    assert Schedule("cubic", 2).progress(1) == 0.875
    with pytest.raises(UnknownNameError, match="did you mean 'cubic'"):
        Schedule("cubik")
    with pytest.raises(InvalidValueError, match="at least one step"):
        Schedule("linear", 0)


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
