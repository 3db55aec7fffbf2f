"""Budgets of milliseconds are met by measurement."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import sparsekit as sk
from sparsekit.errors import InvalidValueError
from sparsekit.measure.clock import measure_latency
from sparsekit.measure.paired import measure_layers, prepare
from sparsekit.pruning.latency import meet_latency


def _net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten(),
                         nn.Linear(64 * 64, 256), nn.ReLU(), nn.Linear(256, 5)).eval()  # fmt: skip


X = torch.randn(4, 3, 12, 12)


def test_a_budget_of_milliseconds_is_met_by_the_measured_model() -> None:
    pruned = sk.prune(_net(), X, budget={"latency_ms": "60%"})
    assert pruned.report.after["latency_ms"] <= pruned.report.limits["latency_ms"]
    assert (
        sk.prune(_net(), X, budget={"latency_ms": "60%", "params": "30%"}).report.after["params"]
        <= pruned.report.before["params"] * 0.3
    )
    with pytest.raises(InvalidValueError, match="prune\\(\\) meets latency_ms by measuring models"):
        sk.LearnableMask(_net(), (X,), budget={"latency_ms": "60%"})


class _Padded(nn.Conv2d):
    """A convolution that holds its padding, as those of EfficientNet do."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.pad = nn.ZeroPad2d(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.pad(x))


def test_layers_that_hold_others_are_timed() -> None:
    model = nn.Sequential(_Padded(3, 32, 3), nn.ReLU(), nn.Sequential(_Padded(32, 8, 3), nn.ReLU())).eval()
    assert measure_layers(model, (X,), {}).keys() == {"", "0", "2.0"}


@pytest.mark.parametrize("runtime", ["export", pytest.param("onnx", marks=pytest.mark.slow)])
def test_a_budget_of_milliseconds_is_measured_in_its_runtime(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if runtime == "onnx":
        pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")
    model, asked = _net(), []

    def noted(*args: Any) -> Any:
        asked.append(args[:2])
        return prepare(*args)

    for place in ("prune", "cutting"):
        monkeypatch.setattr(f"sparsekit.pruning.{place}.prepare", noted)
    pruned = sk.prune(model, (X,), budget=sk.Budget(latency_ms="60%", runtime=runtime))
    assert {own for _, own in asked} == {runtime}
    assert sum(module is model for module, _ in asked) == 1, "the dense model is prepared once to be timed in turns"
    assert pruned.report.after["latency_ms"] <= 0.6 * pruned.report.before["latency_ms"]


@pytest.mark.parametrize(("fixed", "limit"), [(0.0, 10.0), (4.0, 10.0), (9.0, 10.0), (0.0, 40.0)])
def test_the_limit_is_met_whatever_part_of_the_time_flops_do_not_explain(fixed: float, limit: float) -> None:
    found, measured = meet_latency(limit, fixed + 30.0, lambda share: (share, lambda: fixed + 30.0 * share))
    assert measured == pytest.approx(fixed + 30.0 * found)
    assert 0.95 * limit <= measured <= limit or found == 1.0


def test_what_cannot_be_met_says_the_fastest_or_why_no_model_was_made() -> None:
    with pytest.raises(sk.BudgetError, match="fastest narrow model measured took 50 ms"):
        meet_latency(10.0, 60.0, lambda share: (share, lambda: 50.0))

    def refuse(share: float) -> Any:
        raise sk.BudgetError(f"no {share}")

    with pytest.raises(sk.BudgetError, match="no "):
        meet_latency(10.0, 60.0, refuse)


def test_a_model_that_was_fast_once_is_not_what_meets_the_limit() -> None:
    lucky = iter([0.6, 1.0, *[1.0] * 20])
    found, _ = meet_latency(10.0, 15.0, lambda share: (share, lambda: 15.0 * share * next(lucky)))
    assert 9.5 <= 15.0 * found <= 10.0


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
