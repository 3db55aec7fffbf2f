"""norm="kept": networks shrink in width, and a dense network under a mask stays the narrow network."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from laws import random_mask
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from zoo_base import hash_of
from zoo_norms import KEPT

from sparsekit.errors import TraceError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.surgery.compaction import compact
from sparsekit.surgery.kept_norms import KeptNorms, kept_norms
from sparsekit.tracing.trace import FixedUnitsWarning, trace_units


@functools.cache
def traced(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], UnitGraph, list[str]]:
    with torch.random.fork_rng(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(hash_of(name))
        model, args, kwargs = KEPT[name].make(), KEPT[name].inputs(), KEPT[name].kwargs()
        graph = trace_units(model, *args, norm="kept", example_kwargs=kwargs)
    return model, args, kwargs, graph, [str(w.message) for w in caught if issubclass(w.category, FixedUnitsWarning)]


def test_a_layer_norm_of_three_units_of_which_two_are_kept() -> None:
    model = nn.Sequential(nn.Linear(1, 3), nn.LayerNorm(3, eps=1e-15), nn.Linear(3, 1, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [3.0], [70.0]]))
        model[0].bias.zero_()
        model[2].weight.copy_(torch.tensor([[10.0, 100.0, 1000.0]]))
    x = torch.ones(1, 1, dtype=torch.float64)
    graph = trace_units(model, x, norm="kept")
    mask = UnitMask({"0": torch.tensor([True, True, False])})
    small = compact(model, graph, mask)
    assert small[1].normalized_shape == (2,)
    assert small(x).item() == pytest.approx(90.0, abs=1e-9)  # mean 2, deviation 1: -1 · 10 + 1 · 100
    with kept_norms(model, graph, mask), torch.no_grad():
        model[2].weight[0, 2] = 0.0
        assert model(x).item() == pytest.approx(90.0, abs=1e-9)


class _Calls(TorchDispatchMode):
    """Names the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_no_pass_reads_the_mask_back_or_copies_it_to_the_device(ratio: float) -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    graph, x = trace_units(model, torch.randn(4, 3), norm="kept"), torch.zeros(4, 3, device="meta")
    with kept_norms(model.to("meta"), graph, random_mask(graph, ratio, 0)), torch.no_grad(), _Calls() as calls:
        model(x)
    assert not {"_local_scalar_dense", "_to_copy"} & set(calls.names)


def test_the_mask_can_change_from_pass_to_pass() -> None:
    model, args, _, graph, _ = traced("layer-norm")
    dense = copy.deepcopy(model).double().eval()
    norms = KeptNorms(dense, graph)
    x = args[0].double()
    outputs = []
    for seed in (0, 1):
        mask = random_mask(graph, 0.5, seed)
        norms.set_mask(mask, device=torch.device("cpu"))
        gates = {name: keep.double() for name, keep in mask.items()}
        gated = graph.gate(dict(dense.named_parameters()), gates)
        found = torch.func.functional_call(dense, gated, (x,))
        torch.testing.assert_close(found, compact(model.double().eval(), graph, mask)(x), rtol=1e-9, atol=1e-9)
        outputs.append(found)
    assert not torch.allclose(*outputs)


def test_in_inference_the_fused_transformer_kernel_does_not_pass_the_norms_by() -> None:
    model, args, _, graph, _ = traced("transformer-encoder")
    dense, mask = copy.deepcopy(model).eval(), random_mask(graph, 0.5, 0)
    with torch.no_grad():
        gates = {name: keep.float() for name, keep in mask.items()}
        dense.load_state_dict(graph.gate(dense.state_dict(), gates))
        with kept_norms(dense, graph, mask):
            found = dense(*args)
        torch.testing.assert_close(found, compact(dense, graph, mask)(*args), rtol=1e-4, atol=1e-5)


def test_a_model_that_takes_another_path_than_when_it_was_traced_is_told() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head, self.swap = nn.Linear(3, 6), nn.Linear(6, 2), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            h = h - h.var(-1, keepdim=True) if self.swap else h
            out: torch.Tensor = self.head(h - h.mean(-1, keepdim=True))
            return out

    model = Fickle()
    graph = trace_units(model, torch.randn(4, 3), norm="kept")
    model.swap = True
    with kept_norms(model, graph, random_mask(graph, 0.5, 0)), pytest.raises(TraceError, match=r"calls var .* called mean"):
        model(torch.randn(4, 3))


def test_norms_that_differ_in_training_are_fixed() -> None:
    class Differs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(3, 6), nn.Linear(6, 5), nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            if self.training:
                h = h + x.mean()
            out: torch.Tensor = self.head(torch.relu(self.b(h - h.mean(-1, keepdim=True))))
            return out

    with pytest.warns(FixedUnitsWarning, match="'a' .6 units. kept whole: averaged over by one call that sees other units"):
        graph = trace_units(Differs(), torch.randn(4, 3), norm="kept")
    assert list(graph.groups) == ["b"]
