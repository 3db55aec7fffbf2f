"""Budgets: what may be asked for, how it is read, and how milliseconds are met by measurement."""

import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sparsekit as sk
from sparsekit.errors import InvalidValueError
from sparsekit.measure.timing import TimePair, device_of, median_ms, prepare
from sparsekit.pruning.cutting import meet_latency


def test_a_string_is_a_share_and_a_number_is_absolute() -> None:
    budget = sk.Budget(flops="25%", latency_ms=4)
    assert budget.metrics == ("flops", "latency_ms")
    assert budget.limits({"flops": 1000.0, "latency_ms": 9.0}) == {"flops": 250.0, "latency_ms": 4.0}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "needs a metric"),
        ({"flops": "150%"}, r"\(0, 100\] %"),
        ({"flops": "0%"}, "what stays"),
        ({"flops": "half"}, 'share such as "50%"'),
        ({"flops": "50"}, 'share such as "50%"'),
        ({"params": 0.5}, 'pass "50%"'),
        ({"bytes": -3}, "above 0"),
        ({"bytes": float("nan")}, "above 0"),
        ({"flops": True}, "of bool"),
        ({"latency_ms": 4, "runtime": "tensorrt"}, "one of eager, compile, export, onnx"),
        ({"flops": "50%", "runtime": "onnx"}, "is not limited"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_advice(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidValueError, match=told):
        sk.Budget(**given)


def test_a_part_of_the_way_lies_between_the_dense_model_and_the_budget() -> None:
    budget, dense = sk.Budget(flops="50%"), {"flops": 1000.0}
    assert budget.part(0.0, dense).limits(dense) == {"flops": 1000.0}
    assert budget.part(0.5, dense).limits(dense) == {"flops": 750.0}
    assert budget.part(1.0, dense) is budget


def test_the_runtime_goes_with_a_budget_wherever_it_goes() -> None:
    budget = sk.Budget.of("latency_ms=50%,runtime=onnx")
    assert budget == sk.Budget.of({"latency_ms": "50%", "runtime": "onnx"}) == sk.Budget(latency_ms="50%", runtime="onnx")
    assert budget.metrics == ("latency_ms",)
    assert budget.limits({"latency_ms": 8.0}) == {"latency_ms": 4.0}
    assert budget.part(0.5, {"latency_ms": 8.0}) == sk.Budget(latency_ms=6.0, runtime="onnx")
    assert str(budget) == "latency_ms ≤ 50%, run by onnx"


def _net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten(),
                         nn.Linear(64 * 64, 256), nn.ReLU(), nn.Linear(256, 5)).eval()  # fmt: skip


X = torch.randn(4, 3, 12, 12)


@pytest.fixture
def few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test demands holds of the timings, however noisy they are."""
    for name, value in (("_TURNS", 9), ("_PATIENCE", 1)):
        monkeypatch.setattr(f"sparsekit.measure.timing.{name}", value)


@pytest.mark.usefixtures("few_turns")
def test_a_budget_of_milliseconds_is_met_by_the_measured_model() -> None:
    pruned = sk.prune(_net(), X, budget={"latency_ms": "60%"})
    assert pruned.report.after["latency_ms"] <= pruned.report.limits["latency_ms"]
    masked = sk.LearnableMask(_net(), (X,), budget={"latency_ms": "60%"})
    assert masked.unit_mask().counts() != {group.name: group.size for group in masked.graph.groups.values()}


@pytest.mark.usefixtures("few_turns")
def test_a_budget_of_milliseconds_is_measured_in_its_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = _net(), []

    def noted(*args: Any) -> Any:
        asked.append(args[:2])
        return prepare(*args)

    for place in ("prune", "cutting"):
        monkeypatch.setattr(f"sparsekit.pruning.{place}.prepare", noted)
    pruned = sk.prune(model, (X,), budget=sk.Budget(latency_ms="60%", runtime="export"))
    assert {own for _, own in asked} == {"export"}
    assert sum(module is model for module, _ in asked) == 1, "the dense model is prepared once to be timed in turns"
    assert pruned.report.after["latency_ms"] <= 0.6 * pruned.report.before["latency_ms"]


@pytest.mark.parametrize("noisy", [False, True])
def test_a_budget_of_milliseconds_says_how_well_it_could_measure(noisy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = TimePair(1, 1, 9.0, 0.009, 1000.0, 200.0 if noisy else 950.0, 1050.0, 80, measurable=not noisy)
    monkeypatch.setattr("sparsekit.pruning.cutting.time_turns", lambda *_: pair)
    with pytest.warns(UserWarning, match="not measurable: the machine is busy") if noisy else nullcontext():
        report = sk.prune(_net(), X, budget={"latency_ms": "60%"}).report
    told = [note for note in report.notes if note.startswith("latency_ms")]
    assert len(told) == 1
    assert f"in half of 80 turns, the pruned model was {pair.low:.2f} to 1050.00 times as fast" in told[0]
    assert ("machine is busy" in told[0]) == noisy


@pytest.mark.parametrize("share", [0.5, 0.8])
@pytest.mark.parametrize("first", [0.7, 1.6])
def test_milliseconds_are_met_though_the_machine_changes_its_pace(
    first: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pace slows the dense and the small model in a turn. The first timing of the dense model is at an unusual pace."""
    pace, model = itertools.chain([first], itertools.cycle([1.0, 1.0, 1.6, 1.0, 0.7])), _net()
    dense = sk.count_cost(model, X).flops

    def turns(before: Any, after: Any, _timed: Any) -> TimePair:
        own, part = next(pace), sk.count_cost(after(), X).flops / sk.count_cost(before(), X).flops
        return TimePair(1, 1, 10.0 * own, 10.0 * part * own, 1 / part, 0.99 / part, 1.01 / part, 9)

    monkeypatch.setattr("sparsekit.pruning.cutting.time_turns", turns)
    for place in ("prune", "cutting"):
        monkeypatch.setattr(f"sparsekit.pruning.{place}.prepare", lambda module, *_: lambda: module)
    monkeypatch.setattr("sparsekit.pruning.prune.median_ms", lambda *_: 10.0 * next(pace))
    pruned = sk.prune(model, X, budget=sk.Budget(latency_ms=10.0 * share), multiple_of=1)
    assert 0.92 * share < sk.count_cost(pruned.model, X).flops / dense <= share
    assert pruned.report.before["latency_ms"] == pytest.approx(10.0)
    assert 9.2 * share < pruned.report.after["latency_ms"] <= 10.0 * share


@pytest.mark.parametrize("share", [0.4, 0.7])
def test_milliseconds_that_leave_next_to_nothing_of_a_network_are_met_with_a_warning(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the time of a pass, 3.9 of 10 ms do not depend on widths, as where operators are small."""

    def turns(before: Any, after: Any, _timed: Any) -> TimePair:
        after_ms = 3.9 + 6.1 * sk.count_cost(after(), X).flops / sk.count_cost(before(), X).flops
        return TimePair(1, 1, 10.0, after_ms, 10.0 / after_ms, 9.9 / after_ms, 10.1 / after_ms, 9)

    monkeypatch.setattr("sparsekit.pruning.cutting.time_turns", turns)
    for place in ("prune", "cutting"):
        monkeypatch.setattr(f"sparsekit.pruning.{place}.prepare", lambda module, *_: lambda: module)
    monkeypatch.setattr("sparsekit.pruning.prune.median_ms", lambda *_: 10.0)
    told = "most of this network's time does not depend on its widths"
    with pytest.warns(UserWarning, match=told) if share == 0.4 else nullcontext():
        report = sk.prune(_net(), X, budget={"latency_ms": f"{share:.0%}"}).report
    assert report.after["latency_ms"] <= share * 10.0
    assert any(told in note for note in report.notes) == (share == 0.4)


@given(
    fixed=st.floats(0.0, 0.9),
    power=st.sampled_from([0.5, 1.0, 2.0]),
    limit=st.floats(0.05, 1.3),
    smallest=st.floats(0.0, 0.9),
    noise=st.lists(st.sampled_from([0.5, 0.8, 1.0, 1.0, 1.2]), min_size=20, max_size=20) | st.just([1.0] * 20),
)
@settings(max_examples=100)
def test_of_all_models_measured_the_one_nearest_below_the_limit_is_kept(
    fixed: float, power: float, limit: float, smallest: float, noise: list[float]
) -> None:
    """Milliseconds are any monotone function of the share, times noise; no share below `smallest` can be made."""
    draws, mean = iter(noise), statistics.fmean
    times: dict[float, list[float]] = {}
    low, high = 0.0, 1.5  # every new share is above those that were refused or fast enough, and below those that were too slow

    def true(share: float) -> float:
        return fixed + (1.0 - fixed) * share**power

    def cut(share: float) -> tuple[float, Callable[[], float]]:
        nonlocal low, high
        for tried, own in times.items():
            low, high = (max(low, tried), high) if not own or mean(own) <= limit else (low, min(high, tried))
        assert low < share < high or share == 1.0
        times[share] = []
        if share < smallest:
            raise sk.BudgetError(f"no {share}")

        def measure() -> float:
            times[share].append(true(share) * next(draws))
            return times[share][-1]

        return share, measure

    refused: sk.BudgetError | None = None
    noisy = set(noise) != {1.0}
    try:
        found, measured = meet_latency(limit, 1.0, cut, requested="")
    except sk.BudgetError as error:
        refused = error
    accepted = {share: mean(own) for share, own in times.items() if own and mean(own) <= limit}
    if refused is not None:
        fastest = min((mean(own) for own in times.values() if own), default=None)
        assert str(refused).startswith("no ") if fastest is None else refused.least == {"latency_ms": fastest}
        assert not accepted
        assert noisy or true(smallest) > 0.9 * limit
    else:
        assert measured == accepted[found] == max(accepted.values())
        assert len(times[found]) == 2, "a model within the limit is measured twice"
        assert measured >= 0.95 * limit or found == 1.0 or len(times) == 8 or noisy or true(smallest) > 0.8 * limit


@pytest.mark.parametrize("limits", [{"params": "30%"}, {"flops": "40%"}, {"flops": "25%", "params": "70%"}])
def test_the_other_limits_hold_where_milliseconds_would_allow_more(
    limits: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsekit.pruning.cutting.time_turns", lambda *_: TimePair(1, 1, 9.0, 0.009, 1000.0, 999.0, 1001.0, 5))
    report = sk.prune(_net(), X, budget={"latency_ms": "60%", **limits}).report
    for metric, share in limits.items():
        assert report.after[metric] <= report.before[metric] * float(share[:-1]) / 100.0


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps", "xpu"])
def test_a_pass_lasts_until_its_device_has_finished_whatever_that_is(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pending: list[str] = []

    class Elsewhere(nn.Module):
        def parameters(self, recurse: bool = True) -> Iterator[Any]:
            yield SimpleNamespace(device=torch.device(kind))

        def forward(self) -> None:
            assert not pending, "the pass before was not waited for"
            pending.append("a kernel that still runs")

    asked = []
    device = SimpleNamespace(synchronize=lambda *_: pending.clear())
    monkeypatch.setattr(torch, "get_device_module", lambda where: asked.append(torch.device(where).type) or device)
    model = Elsewhere()
    median_ms(model, device_of(model), seconds=0.0)
    assert set(asked) == {kind}
    assert not pending
