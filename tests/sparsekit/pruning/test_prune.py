"""prune(): one call from a model and a budget to a smaller model and a report; no budget is ever exceeded."""

import functools
import inspect
import itertools
import json
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from laws import check_masked_equals_compact
from torch import nn

import sparsekit as sk
from sparsekit.allocation import Schedule, allocate, by_cost, by_ratio, global_ranking, ratio_counts, uniform
from sparsekit.allocation.limits import free_counts, step_of
from sparsekit.errors import InvalidValueError, UnknownNameError
from sparsekit.pruning.selection import read_limits, select_groups
from sparsekit.tracing.inputs import ModelInputs


def _net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 24, 3), nn.ReLU(), nn.Flatten(),
            nn.Linear(24 * 16, 32), nn.ReLU(), nn.Linear(32, 5),
        ).eval()  # fmt: skip


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
HALF = partial(sk.allocation.by_ratio, ratios=0.5)
NAN = sk.criteria.Scored({name: torch.full((size,), torch.nan) for name, size in (("0", 16), ("3", 24), ("6", 32))})


@pytest.mark.same_bits
def test_the_small_model_is_within_the_budget_and_equals_the_masked_one() -> None:
    model = _net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pruned = sk.prune(model, (X,), budget=sk.Budget(flops="50%"))
    cost = sk.count_cost(pruned.model, X)
    assert cost.flops <= 0.5 * sk.count_cost(model, X).flops
    assert cost.flops == pruned.report.after["flops"] * 2
    assert cost.parameters == pruned.report.after["params"]
    assert cost.bytes == pruned.report.after["bytes"]
    gated = pruned.graph.gate(model.state_dict(), {name: keep.float() for name, keep in pruned.mask.items()})
    torch.testing.assert_close(pruned.model(X), torch.func.functional_call(model, gated, (X,)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_widths_are_multiples_of_eight_by_default_and_the_budget_is_used() -> None:
    widths = [3, 128, 128, 128, 5]
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Conv2d(*pair, 1), nn.ReLU())]
    model, x = nn.Sequential(*layers), X
    plain = sk.prune(model, x, budget="flops=50%", multiple_of=1)
    report = sk.prune(model, x, budget="flops=50%").report
    assert all(group.after % 8 == 0 for group in report.groups)
    assert 0.98 * report.limits["flops"] <= report.after["flops"] <= report.limits["flops"]
    assert any(group.after % 8 for group in plain.report.groups)
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert report.minimum == plain.report.minimum, "a preference gives way to a budget"
    assert report.multiple == next(n for n in (16, 8) if all(group.after % n == 0 for group in report.groups))
    assert f"widths in multiples of {report.multiple}" in str(report).splitlines()[0]
    assert "any width" in str(plain.report).splitlines()[0]
    assert "multiples of 32" in str(sk.plan(model, x, budget="flops=50%", multiple_of=32))


@pytest.mark.parametrize(("allocation", "criterion"), [("by_cost", "magnitude"), ("global", "random"), ("uniform", None)])
def test_allocations_and_criteria_go_by_name(allocation: str, criterion: str | None) -> None:
    report = sk.prune(_net(), X, budget="flops=40%", allocation=allocation, criterion=criterion).report
    assert 0.3 * report.before["flops"] < report.after["flops"] <= 0.4 * report.before["flops"]


def test_what_is_kept_stays_whole_limits_and_multiples_hold_and_the_report_says_so() -> None:
    pruned = sk.prune(_net(), X, budget="flops=50%", exclude=["0"], limits={nn.Linear: (0.5, 0.75)}, multiple_of=4)
    report, after = pruned.report, {group.name: group.after for group in pruned.report.groups}
    assert after["0"] == 16
    assert 16 <= after["6"] <= 24
    assert all(count % 4 == 0 for count in after.values())
    assert report.requested == {"flops": "50%"}
    assert "(50%)" in report.tables()["Costs"][1][0][4]
    assert report.minimum["flops"] < report.after["flops"] <= report.limits["flops"] == report.before["flops"] / 2
    assert list(after) == list(pruned.graph.groups)
    assert "flops: " in str(report)
    assert "requested ≤" in str(report)


@pytest.mark.parametrize("more", [{}, {"batches": [torch.cat([X] * 4)] * 32}, {"ratio": {"0": 0.5}, "budget": None}])
def test_a_plan_is_that_of_the_cut_that_prune_makes(more: dict[str, Any]) -> None:
    model = _net()
    plan = sk.plan(model, X, **{"budget": "flops=50%", **more})
    pruned = sk.prune(model, X, **{"budget": "flops=50%", **more})
    assert not isinstance(plan, sk.Pruned)
    assert plan.mask == pruned.mask
    notes = [note for note in pruned.report.notes if not note.startswith("Left out")]  # a plan repairs nothing
    assert (plan.widths, plan.cost, plan.notes) == (pruned.widths, pruned.cost, notes)
    assert str(plan).startswith("Sequential, ")
    assert set(str(plan).splitlines()) <= set(str(pruned).splitlines())
    how = f"{plan.report.criterion}, {plan.report.allocation}"
    assert repr(plan) == f"PrunePlan(Sequential: {sum(plan.widths.values())} of 72 units; {how})"
    names = inspect.signature(sk.prune).parameters
    assert list(inspect.signature(sk.plan).parameters) == [
        name for name in names if name not in ("choose_by", "metric", "schedule", "finetune")
    ]


@pytest.mark.parametrize(
    ("ratio", "widths"),
    [
        (0.5, [8, 12, 16]),
        ({"3": 0.25}, [16, 6, 32]),
        ({nn.Conv2d: 0.5, "3": 0.25, "channel": 0.1, nn.Linear: 0.75}, [8, 6, 24]),
        ({r"[03]": 0.3}, [5, 8, 32]),
    ],
)
@pytest.mark.parametrize("data", [False, True])
def test_a_ratio_sets_the_width_of_each_layer(ratio: Any, widths: list[int], data: bool) -> None:
    batches = [torch.cat([X] * 4)] * 32 if data else None
    pruned = sk.prune(_net(), X, ratio=ratio, batches=batches)
    assert list(pruned.widths.values()) == widths
    assert list(sk.prune(_net(), X, ratio=ratio, multiple_of=4).widths.values()) == [-(-width // 4) * 4 for width in widths]


def test_what_cannot_be_met_is_refused_before_anything_is_scored() -> None:
    seen: list[Any] = []

    class Never(sk.criteria.Magnitude):
        def scores(self, graph: sk.UnitGraph, context: sk.ScoringContext) -> Any:
            seen.append(graph)

    more: list[dict[str, Any]] = [
        {},
        {"budget": "flops=0.01%"},
        {"budget": "flops=50%", "limits": {"0": (0.6, 0.7)}, "multiple_of": 16},
        {"allocation": ["uniform", "by_cost"]},
        {"ratio": 0.5, "budget": "flops=50%"},
        {"ratio": 0.5, "allocation": "uniform"},
        {"ratio": {"8": 0.5}},
        {"ratio": {"3": 1.5}},
    ]
    for batches in (None, [torch.cat([X] * 4)] * 32):
        for each in more:
            with pytest.raises((InvalidValueError, UnknownNameError)) as caught:
                sk.prune(_net(), X, criterion=[Never(), Never()], batches=batches, **each)
            assert "andidate" not in str(caught.value)
    assert seen == []


@pytest.mark.parametrize("name", ["flops", "params", "bytes"])
def test_a_number_that_looks_like_a_share_is_asked_about(name: str) -> None:
    with pytest.raises(sk.BudgetError, match=f'Did you mean 50 % of the dense model. Then pass {name}="50%"'):
        sk.prune(_net(), X, budget={name: 50})
    with pytest.raises(sk.BudgetError) as caught:
        sk.prune(_net(), X, budget={name: 101}, limits={"channel": (0.5, 1.0)})
    assert "Did you mean" not in str(caught.value)


def test_more_milliseconds_than_the_dense_model_takes_are_asked_about() -> None:
    with pytest.warns(UserWarning, match='latency_ms="100%"'):
        sk.prune(_net(), X, budget="latency_ms=100")


def test_a_schedule_trains_between_the_cuts_and_ends_within_the_budget() -> None:
    seen: list[tuple[int, float]] = []

    def finetune(small: nn.Module, step: int) -> None:
        seen.append((step, sk.count_cost(small, X).flops / 2))
        with torch.no_grad():
            for entry in small.parameters():
                entry.add_(0.01)

    model = _net()
    pruned = sk.prune(
        model,
        X,
        budget="flops=30%",
        limits={"3": (0.25, 0.9)},
        multiple_of=2,
        schedule=Schedule("linear", 3),
        finetune=finetune,
    )
    assert [step for step, _ in seen] == [1, 2, 3]
    costs = [cost for _, cost in seen]
    assert costs == sorted(costs, reverse=True)
    assert costs == [step["flops"] for step in pruned.report.steps]
    assert costs[0] <= (1 - 0.7 / 3) * pruned.report.before["flops"] + 1
    assert pruned.report.after["flops"] <= 0.3 * pruned.report.before["flops"]
    assert 6 <= pruned.mask.counts()["3"] <= 20
    expected = sk.compact(model, pruned.graph, pruned.mask)
    for entry, own in zip(expected.parameters(), pruned.model.parameters(), strict=True):
        torch.testing.assert_close(own, entry + 0.03)


@pytest.mark.parametrize(
    ("more", "error", "told"),
    [
        ({"budget": {"flops": "120%"}}, InvalidValueError, r"\(0, 100\] %"),
        ({"budget": {"flops": 1}}, sk.BudgetError, "is the minimum"),
        ({"budget": {"flop": "50%"}}, UnknownNameError, "did you mean 'flops'"),
        ({"budget": 0.5}, InvalidValueError, "must be a Budget"),
        ({"budget": None}, InvalidValueError, "needs a budget.*or ratio=0.5"),
        ({"criterion": "magnitud"}, UnknownNameError, "did you mean 'magnitude'"),
        ({"criterion": NAN}, InvalidValueError, "hold NaN"),
        ({"allocation": "globl"}, UnknownNameError, "did you mean 'global'"),
        ({"allocation": HALF, "budget": None, "schedule": Schedule("linear", 2)}, InvalidValueError, "schedule of 2"),
        ({"schedule": "linearly"}, UnknownNameError, "did you mean 'linear'"),
        ({"exclude": ["nothing"]}, UnknownNameError, "selects nothing"),
        ({"exclude": [r"layer\d"]}, UnknownNameError, "selects nothing"),
        ({"exclude": ["33"]}, UnknownNameError, "did you mean '3'"),
        ({"exclude": [nn.LSTM]}, UnknownNameError, "no module of type 'LSTM'"),
        ({"exclude": [nn.ReLU]}, InvalidValueError, "selects layers without weights"),
        ({"exclude": [3]}, InvalidValueError, "by name, regular expression, type or module"),
        ({"reconstruct": "all"}, InvalidValueError, "reconstruct must be"),
        ({"schedule": 3}, InvalidValueError, "schedule must be a name or"),
        ({"limits": ["0"]}, InvalidValueError, "limits must map layers to"),
        ({"metric": "accuracy"}, InvalidValueError, "metric must be a function"),
        ({"finetune": 3}, InvalidValueError, "finetune must be a function"),
        ({"multiple_of": sk.allocation.PreferredMultiple(3)}, InvalidValueError, "must be a power of two, such as 8, got 3"),
    ],
)
def test_bad_input_is_refused(more: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        sk.prune(_net(), X, **{"budget": "flops=50%", **more})


def test_a_warning_points_at_the_line_of_the_user() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        sk.prune(model, torch.zeros(2, 8), budget="params=90%")
        sk.LearnableMask(model, (torch.zeros(2, 8),), ratio=0.5)
    assert [one.filename for one in seen if "cannot be pruned" in str(one.message)] == [__file__] * 2


@functools.cache
def _traced(name: str) -> tuple[Any, Any, Any, sk.UnitGraph, Any]:
    model, args, kwargs, graph = zoo.traced(name)
    return model.eval(), args, kwargs, graph, sk.cost_model(model, ModelInputs(args, kwargs), graph)


NAMES = sorted(name for name, each in zoo.ZOO.items() if each.groups)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(NAMES),
    kind=st.sampled_from([by_cost, global_ranking, uniform]),
    metric=st.sampled_from(["flops", "params", "bytes"]),
    place=st.floats(0.02, 1.0),
    seed=st.integers(0, 2**16),
    multiple=st.sampled_from([1, 1, 2, 3]),
    limited=st.booleans(),
)
def test_no_budget_is_exceeded_and_every_cut_is_exact(
    name: str, kind: Any, metric: str, place: float, seed: int, multiple: int, limited: bool
) -> None:
    model, args, kwargs, graph, costs = _traced(name)
    rng = np.random.default_rng(seed)
    scores = {name: torch.from_numpy(rng.exponential(size=group.size)) for name, group in graph.groups.items()}
    limits = {next(iter(graph.groups)): (0.5, 1.0)} if limited and not graph.ties else {}
    free = free_counts(graph, limits, multiple)
    least = costs.costs({name: counts[0] for groups, counts in free.items() for name in groups})[metric]
    dense = costs.dense_costs()[metric]
    limit = max(1.0, least + place * (dense - least))
    budget = sk.Budget(**{metric: limit})
    counts = allocate(kind, graph, scores, costs, budget=budget, limits=limits, multiple_of=multiple)
    found = costs.costs(counts)[metric]
    assert found <= limit
    for group in graph.groups.values():
        count = counts[group.name]
        assert count % step_of(group, multiple) == 0 or count == group.size or graph.ties
        assert count >= limits.get(group.name, (0.0, 1.0))[0] * group.size
    mask = sk.mask_from_scores(graph, scores, counts)
    check_masked_equals_compact(model, args, kwargs, graph, mask, gradients=False)
    if kind is by_cost or (kind is global_ranking and multiple == 1 and not limits and not graph.ties):
        for groups, allowed in free.items():
            wider = [n for n in allowed if n > counts[groups[0]]]
            if wider:
                assert costs.costs({**counts, **dict.fromkeys(groups, wider[0])})[metric] > limit


IMAGE = torch.randn(1, 3, 5, 5)


@pytest.fixture(scope="module")
def net() -> tuple[nn.Module, sk.UnitGraph]:
    stage1 = nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 8, 3, padding=1), bn=nn.BatchNorm2d(8), act=nn.ReLU()))
    stage2 = nn.Sequential(nn.Conv2d(6, 10, 3, padding=1), nn.ReLU(), nn.Conv2d(10, 6, 3, padding=1))
    model = zoo.Lambda(
        lambda m, x: m.head(((h := m.enter(m.stage1(x))) + m.stage2(h)).mean((2, 3))),
        stage1=stage1, enter=(8, 6, 1), stage2=stage2, head=(6, 4),
    )  # fmt: skip
    return model, sk.trace_units(model, IMAGE)


@pytest.mark.parametrize(
    ("selector", "groups"),
    [
        ("stage1.conv", ("stage1.conv",)),
        ("stage1", ("stage1.conv",)),
        ("stage2", ("enter", "stage2.0")),
        (r"stage2\..*", ("enter", "stage2.0")),
        (r".*\.conv|enter", ("stage1.conv", "enter")),
        (nn.Conv2d, ("stage1.conv", "enter", "stage2.0")),
        (nn.BatchNorm2d, ("stage1.conv",)),
        ("head", ()),
    ],
)
def test_a_selection_means_the_groups_whose_units_it_makes(
    net: tuple[nn.Module, sk.UnitGraph], selector: Any, groups: tuple[str, ...]
) -> None:
    assert select_groups(*net, selector) == groups


@pytest.mark.parametrize(
    "given",
    [
        lambda model, graph, text: sk.prune(model, IMAGE, budget="flops=80%", graph=graph, exclude=[text]),
        lambda model, graph, text: sk.prune(model, IMAGE, budget="flops=80%", graph=graph, limits={text: (0.5, 1.0)}),
        lambda model, graph, text: sk.prune(model, IMAGE, graph=graph, allocation=partial(by_ratio, ratios={text: 0.5})),
        lambda _, graph, text: ratio_counts(graph, {text: 0.5}),
    ],
    ids=["exclude", "limits", "by_ratio", "ratio_counts"],
)
def test_a_bad_regular_expression_ends_in_a_sentence_wherever_it_is_given(
    net: tuple[nn.Module, sk.UnitGraph], given: Callable[..., object]
) -> None:
    for text in ("(stage", "*", "[a", "a{2,1}"):
        with pytest.raises(
            InvalidValueError, match=f"^{re.escape(repr(text))} is neither a (name|group) nor a regular expression: "
        ):
            given(*net, text)


def test_all_limits_of_a_group_hold_and_keep_goes_over_them(net: tuple[nn.Module, sk.UnitGraph]) -> None:
    limits = read_limits(*net, ["enter"], {"stage2": (0.2, 0.9), r"stage2\.0": (0.5, 1.0)})
    assert limits == {"enter": (1.0, 1.0), "stage2.0": (0.5, 0.9)}


class _Grouped(nn.Module):
    """A softmax over eight channels, which go together."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 1), nn.Conv2d(4, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        out: torch.Tensor = self.second(x.view(x.shape[0], x.shape[1] // 8, 8, *x.shape[2:]).softmax(2).amax(2))
        return out


def test_channels_that_are_removed_several_at_once_are_counted_one_by_one() -> None:
    report = sk.prune(_Grouped(), torch.randn(2, 3, 4, 4), budget="flops=60%").report
    [group] = report.groups
    assert (group.before, group.after, group.together) == (32, 16, 8)
    assert "first: 32 → 16 channels" in str(report)
