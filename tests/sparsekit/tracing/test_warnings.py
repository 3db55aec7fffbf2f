"""What a trace cannot promise is told: branches that the example does not take, and tensors over one memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laws import trace
from torch import Tensor, nn
from zoo_base import Lambda

from sparsekit.tracing.trace import OneBranchWarning, TrainModeWarning, UntiedWarning


def _hidden(m: Any, x: Tensor) -> Tensor:
    return F.relu(m.a(x))


def _batch_of_one(m: Any, x: Tensor) -> Tensor:
    h = _hidden(m, x)
    if x.shape[0] == 1:
        h = h / h.shape[1]
    return m.b(h)


def _long(m: Any, x: Tensor) -> Tensor:
    h = _hidden(m, x)
    return m.b(torch.cat([part / h.shape[1] for part in h.split(4)]) if x.size(0) > 4 else h)


def _value(m: Any, x: Tensor) -> Tensor:
    h = _hidden(m, x)
    if x.mean() > 5:
        h = h / h.shape[1]
    return m.b(h)


def _number(m: Any, x: Tensor) -> Tensor:
    largest = float(x.abs().max())
    return m.b(_hidden(m, x) * (2.0 if largest > 50 else 1.0))


def _under_a_name(m: Any, x: Tensor) -> Tensor:
    alone = len(x) < 2 or x.shape[0] < 2
    h = _hidden(m, x)
    if alone:
        h = h / h.shape[1]
    return m.b(h)


BRANCHES = [_batch_of_one, _long, _value, _number, _under_a_name]


def _net(forward: Callable[..., Any]) -> nn.Module:
    return Lambda(forward, a=(8, 12), b=(12, 3))


@pytest.mark.parametrize(("forward", "rows"), [*((each, 3) for each in BRANCHES), *((each, 1) for each in BRANCHES[1:4])])
def test_a_branch_on_an_input_is_told_with_its_line(forward: Callable[..., Any], rows: int) -> None:
    (told,) = trace(_net(forward), torch.rand(rows, 8), category=OneBranchWarning)[1]
    assert "at test_warnings.py:" in told
    assert "Pass a list of calls" in told


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.b(_hidden(m, x) * (2 if x.size(0) > 4 else 1)),
        lambda m, x: m.b(_hidden(m, x) * (2 if x.mean() > 5 else 1)),
    ],
)
def test_calls_for_both_sides_of_a_branch_need_no_warning(forward: Callable[..., Any]) -> None:
    graph, told = trace(_net(forward), [(torch.rand(3, 8),), (torch.rand(6, 8) + 9,)], category=OneBranchWarning)
    assert list(graph.groups) == ["a"]
    assert told == []


def _checks(m: Any, x: Tensor) -> Tensor:
    if x.dim() != 2 or x.shape[1] != 8 or not torch.isfinite(x).all():
        raise ValueError("two axes, please")
    assert x.shape[0] < 100
    h = _hidden(m, x)
    return m.b(h + h if h.shape[0] == x.shape[0] else h)


def test_checks_and_shapes_of_two_tensors_are_no_branches() -> None:
    graph, told = trace(_net(_checks), torch.rand(3, 8), category=OneBranchWarning)
    assert list(graph.groups) == ["a"]
    assert told == []


def _without_gradients(m: Any, x: Tensor) -> Tensor:
    h = _hidden(m, x)
    if h.requires_grad:
        raise RuntimeError("for inference only")
    y: Tensor = m.b(h)
    return y


def test_gradients_that_could_not_be_compared_are_told_with_the_error() -> None:
    graph, told = trace(_net(_without_gradients), torch.rand(6, 8), category=TrainModeWarning)
    assert list(graph.groups) == ["a"]
    assert len(told) == 1
    assert "fails when it runs with gradients: RuntimeError: for inference only at test_warnings.py" in told[0]


class Overlapping(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 12), nn.Linear(12, 8)
        if how == "transposed":
            self.b.weight.data = self.a.weight.data.t()
        elif how == "a part":
            self.b.weight = nn.Parameter(self.a.weight.data.view(-1)[:96].view(8, 12))
        elif how == "attribute":
            self.seen = self.a.weight.detach().view(-1)
        elif how == "side by side":
            flat = torch.randn(192)
            self.a.weight, self.b.weight = nn.Parameter(flat[:96].view(12, 8)), nn.Parameter(flat[96:].view(8, 12))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(F.relu(self.a(x)))
        return out


@pytest.mark.parametrize("how", ["transposed", "a part", "attribute", "side by side", "apart"])
def test_tensors_over_one_memory_are_told_if_a_cut_unties_them(how: str) -> None:
    told = trace(Overlapping(how), torch.rand(3, 8), category=UntiedWarning)[1]
    assert len(told) == (how not in ("side by side", "apart"))
    assert all("'a.weight'" in each for each in told)


def test_a_norm_of_weights_is_told_with_the_call_that_folds_it() -> None:
    normed = nn.utils.parametrizations.weight_norm
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), normed(nn.Linear(12, 9)), nn.ReLU(), nn.Linear(9, 3))
    graph, told = trace(model, torch.rand(3, 8))
    assert list(graph.groups) == ["2"]
    assert len(told) == 1
    assert "remove_parametrizations(layer, 'weight')" in told[0]
    nn.utils.parametrize.remove_parametrizations(model[2], "weight")
    assert list(trace(model, torch.rand(3, 8))[0].groups) == ["0", "2"]
