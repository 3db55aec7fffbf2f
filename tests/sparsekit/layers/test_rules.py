"""A layer without its rule, or with a wrong one, keeps its units whole; a rule is found by the name of its layer."""

import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.labels.tracer import Tracer
from sparsekit.layers import find_rule

LAYER_RULE: Any = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[3] / "examples/layer_rule.py")))
"""The rules of the example keep the contract where the examples are tested."""


def test_without_its_rule_a_strange_layer_is_probed() -> None:
    model = nn.Sequential(nn.Linear(3, 6), LAYER_RULE.Centred(6), nn.Linear(6, 2))
    assert sk.trace_units(model, torch.randn(2, 5, 3)).groups["0"].size == 6, "a median over time keeps features apart"


class Careless(LAYER_RULE.CentredRule):  # type: ignore[name-defined, misc]
    def trace(
        self, tracer: Tracer, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        out = run(*args, **kwargs)
        tracer.set(out, tracer.labels(args[0]))
        return out


def test_a_wrong_rule_is_caught_by_the_verification() -> None:
    model = nn.Sequential(nn.Linear(3, 6), LAYER_RULE.Centred(6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    with pytest.warns(UserWarning, match=r"'0' \(6 units\) cannot be pruned: the compacted model fails"):
        graph = sk.trace_units(model, torch.randn(2, 5, 3), rules={LAYER_RULE.Centred: Careless()})
    assert list(graph.groups) == ["2"]


def test_a_layer_of_a_package_that_is_not_imported_is_known_by_its_name() -> None:
    class Conv1D(nn.Module):
        def __init__(self, nf: int, nx: int) -> None:
            super().__init__()
            self.nf, self.nx = nf, nx
            self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], self.nf)

    Conv1D.__module__, Conv1D.__qualname__ = "transformers.pytorch_utils", "Conv1D"
    model = nn.Sequential(Conv1D(6, 3), nn.ReLU(), Conv1D(2, 6))
    assert find_rule(model[0]) is not None
    graph = sk.trace_units(model, torch.randn(2, 4, 3))
    assert {name: group.size for name, group in graph.groups.items()} == {"0": 6}
    small = sk.compact(model, graph, sk.UnitMask({"0": torch.arange(6) < 4}))
    assert (small[0].nf, small[0].nx, small[2].nx) == (4, 3, 4)
