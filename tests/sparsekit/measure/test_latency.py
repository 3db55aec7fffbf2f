"""Latency tables: of every layer, kept on disk, monotone; budgets of milliseconds are met by measurement."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import sparsekit as sk
from sparsekit.measure.clock import LatencyCache, cache_folder
from sparsekit.measure.latency import measure_latency, measure_table
from sparsekit.measure.paired import measure_layers, prepare
from sparsekit.measure.volumes import CostTracker
from sparsekit.pruning.latency import meet_latency


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEKIT_CACHE", str(tmp_path / "cache"))


def _net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten(),
                         nn.Linear(64 * 64, 256), nn.ReLU(), nn.Linear(256, 5)).eval()  # fmt: skip


X = torch.randn(4, 3, 12, 12)


def test_the_table_is_that_of_the_whole_model_and_falls_with_the_widths() -> None:
    model = _net()
    graph = sk.trace_units(model, X)
    meter = measure_table(model, (X,), {}, graph)
    counts = {name: group.size for name, group in graph.groups.items()}
    times = [meter.at({name: max(1, int(share * count)) for name, count in counts.items()}) for share in (1, 0.7, 0.4, 0.1)]
    assert times == sorted(times, reverse=True)
    assert times[0] > 0
    tracker = CostTracker({"latency_ms": meter}, counts)
    assert tracker.gain(("0",), 4, {"latency_ms": 0.0}) > 0
    assert tracker.gain(("0",), 4, {"latency_ms": 1e9}) == 0


def test_what_was_measured_is_read_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _net()
    graph = sk.trace_units(model, X)
    first = measure_table(model, (X,), {}, graph)
    runs = []
    monkeypatch.setattr("sparsekit.measure.latency.measure_latency", lambda *_, **__: runs.append(1) or 3.0)
    second = measure_table(model, (X,), {}, graph)
    assert len(runs) == 1, "the whole model alone is measured again"
    assert second._tables.shape == first._tables.shape
    assert cache_folder().joinpath("latency").is_dir()


def test_a_damaged_or_unwritable_cache_is_told_and_does_not_stop_anything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = LatencyCache(torch.device("cpu"), tmp_path)
    cache["layer"] = 0.5
    cache.save()
    assert LatencyCache(torch.device("cpu"), tmp_path).get("layer") == 0.5
    cache.path.write_text("{", encoding="utf-8")
    assert LatencyCache(torch.device("cpu"), tmp_path).get("layer") is None
    assert "measured again" in caplog.text
    (tmp_path / "file").write_text("", encoding="utf-8")
    blocked = LatencyCache(torch.device("cpu"), tmp_path / "file")
    blocked["layer"] = 0.5
    blocked.save()
    assert "SPARSEKIT_CACHE" in caplog.text


@pytest.mark.parametrize("name", ["vit-fused-qkv", "squeeze-excite", "lstm-stacked"])
def test_layers_of_all_kinds_are_measured(name: str) -> None:
    model, args, kwargs, graph = zoo.traced(name)
    meter = measure_table(model, args, kwargs, graph)
    assert meter.at(dict.fromkeys(graph.groups, 1)) <= meter.at({name: g.size for name, g in graph.groups.items()})


def test_a_budget_of_milliseconds_is_met_by_the_measured_model() -> None:
    pruned = sk.prune(_net(), X, budget={"latency_ms": "60%"})
    assert pruned.report.after["latency_ms"] <= pruned.report.limits["latency_ms"]
    assert "error of the table, small model" in pruned.report.measured


class _Padded(nn.Conv2d):
    """A convolution that holds its padding, as those of EfficientNet do."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.pad = nn.ZeroPad2d(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.pad(x))


def test_layers_that_hold_others_are_timed() -> None:
    model = nn.Sequential(_Padded(3, 32, 3), nn.ReLU(), nn.Sequential(_Padded(32, 8, 3), nn.ReLU())).eval()
    meter = measure_table(model, (X,), {}, sk.trace_units(model, X))
    assert meter._tables.shape[0] == 4, "two convolutions and two activations"
    assert measure_layers(model, (X,), {}).keys() == {"", "0", "2.0"}


@pytest.mark.parametrize("runtime", ["export", pytest.param("onnx", marks=pytest.mark.slow)])
def test_a_budget_of_milliseconds_is_measured_in_its_runtime(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if runtime == "onnx":
        pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")
    model, asked = _net(), []

    def noted(*args: Any) -> Any:
        asked.append(args[:2])
        return prepare(*args)

    for place in ("measure.latency", "pruning.cutting"):
        monkeypatch.setattr(f"sparsekit.{place}.prepare", noted)
    pruned = sk.prune(model, (X,), budget=sk.Budget(latency_ms="60%", runtime=runtime))
    assert {own for _, own in asked} == {runtime}
    assert sum(module is model for module, _ in asked) == 1, "the dense model is prepared once to be timed in turns"
    assert pruned.report.after["latency_ms"] <= 0.6 * pruned.report.before["latency_ms"]


def test_the_limit_is_met_where_the_table_is_wrong() -> None:
    def cut(budget: sk.Budget) -> tuple[float, float]:
        assert isinstance(budget.latency_ms, float)
        return budget.latency_ms, 1.7 * budget.latency_ms

    found, measured = meet_latency(sk.Budget(latency_ms=10.0), 10.0, cut)
    assert found == pytest.approx(measured / 1.7)
    assert 9.5 <= measured <= 10.0
    with pytest.raises(sk.BudgetError, match="fastest narrow model measured took"):
        meet_latency(sk.Budget(latency_ms=10.0), 10.0, lambda _: (0, 50.0))


def test_a_model_that_was_fast_once_is_not_what_meets_the_limit() -> None:
    lucky = iter([0.6, 1.0, *[1.0] * 20])

    def cut(budget: sk.Budget) -> tuple[float, float]:
        assert isinstance(budget.latency_ms, float)
        return budget.latency_ms, 1.5 * budget.latency_ms * next(lucky)

    found, _ = meet_latency(sk.Budget(latency_ms=10.0), 10.0, cut)
    assert 9.5 <= 1.5 * found <= 10.0


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
    measure_latency(Elsewhere(), (), {}, seconds=0.0)
    assert set(asked) == {kind}
    assert not pending
