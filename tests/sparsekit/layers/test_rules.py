"""A layer rule of a user keeps the contract, and a wrong one is caught."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from sparsekit.errors import NoUnitsError
from sparsekit.graph.mask import UnitMask
from sparsekit.layers import LayerRule, find_rule
from sparsekit.layers.labels.tracer import Tracer
from sparsekit.layers.labels.values import TensorLabels
from sparsekit.surgery.compaction import compact
from sparsekit.testing.rules import RuleContract
from sparsekit.tracing.trace import trace_units


class Centred(nn.Module):
    """A layer that the operators do not explain: it takes off a median over time, unit by unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == self.width
        scaled = x * self.scale
        return scaled - scaled.nanmedian(dim=1, keepdim=True).values


class CentredRule(LayerRule):
    types: ClassVar[tuple[type[nn.Module], ...]] = (Centred,)
    opaque: ClassVar[bool] = True

    def resize(self, module: nn.Module) -> None:
        assert isinstance(module, Centred)
        module.width = module.scale.shape[0]

    def trace(
        self, tracer: Tracer, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        assert isinstance(module, Centred)
        out = run(*args, **kwargs)
        entering, scale = tracer.labels(args[0]), tracer.labels(module.scale)
        units, own = entering.axes[-1], scale.axes[0]
        if units is None or own is None:
            tracer.fix(entering, "no units reach the layer")
            tracer.fix(scale, "no units reach the layer")
            return out
        tracer.unite(units.nodes, own.nodes)
        tracer.make(scale, 0)
        tracer.set(out, TensorLabels((None, None, own)))
        return out


class TestOwnRule(RuleContract):
    @pytest.fixture
    def rule(self) -> LayerRule:
        return CentredRule()

    @pytest.fixture
    def network(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 6), Centred(6), nn.Linear(6, 2))

    @pytest.fixture
    def inputs(self) -> tuple[Any, ...]:
        return (torch.randn(2, 5, 3),)


def test_without_its_rule_a_strange_layer_keeps_units_whole() -> None:
    model = nn.Sequential(nn.Linear(3, 6), Centred(6), nn.Linear(6, 2))
    with pytest.warns(UserWarning, match="nanmedian"), pytest.raises(NoUnitsError):
        trace_units(model, torch.randn(2, 5, 3))


class Careless(CentredRule):
    """A rule that forgets that the scale goes with the units."""

    def trace(
        self, tracer: Tracer, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        out = run(*args, **kwargs)
        tracer.set(out, tracer.labels(args[0]))
        return out


def test_a_wrong_rule_is_caught_by_the_verification() -> None:
    model = nn.Sequential(nn.Linear(3, 6), Centred(6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    with pytest.warns(UserWarning, match=r"'0' \(6 units\) kept whole: the compacted model fails"):
        graph = trace_units(model, torch.randn(2, 5, 3), rules={Centred: Careless()})
    assert list(graph.groups) == ["2"]


def test_a_layer_of_a_package_that_is_not_imported_is_known_by_its_name() -> None:
    class Conv1D(nn.Module):
        """As in transformers."""

        def __init__(self, nf: int, nx: int) -> None:
            super().__init__()
            self.nf, self.nx = nf, nx
            self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], self.nf)

    Conv1D.__module__, Conv1D.__qualname__ = "transformers.pytorch_utils", "Conv1D"
    model = nn.Sequential(Conv1D(6, 3), nn.ReLU(), Conv1D(2, 6))
    assert find_rule(model[0]) is not None
    graph = trace_units(model, torch.randn(2, 4, 3))
    assert {name: group.size for name, group in graph.groups.items()} == {"0": 6}
    small = compact(model, graph, UnitMask({"0": torch.arange(6) < 4}))
    assert (small[0].nf, small[0].nx, small[2].nx) == (4, 3, 4)
