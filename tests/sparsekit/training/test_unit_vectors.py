"""UnitVectors: gate gradients, magnitudes and the check of the mask agree with the slow way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from sparsekit import NarrowModel, select, trace_units
from sparsekit.criteria import Random, View
from sparsekit.training.unit_vectors import Reader, UnitVectors


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_the_gate_gradient_is_the_derivative_of_the_loss_by_a_gate(ratio) -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * 4 * 4, 5), nn.Tanh(), nn.Linear(5, 3),
    ).double()  # fmt: skip
    x, y = torch.randn(4, 2, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    graph = trace_units(dense, x)
    narrow_model = NarrowModel(dense, graph)
    fused = UnitVectors(narrow_model)
    mask = select(Random(), graph, ratio, View(generator=torch.Generator().manual_seed(1)))
    narrow_model.load(dense.state_dict(), mask)
    fused.reload()
    F.cross_entropy(narrow_model.module(x), y).backward()
    found = torch.zeros(fused.total, dtype=torch.float64).index_copy(0, fused.slot_units, fused.gate_gradient())
    gates = {name: keep.double().requires_grad_() for name, keep in narrow_model.mask.items()}
    gated = graph.gate(dict(dense.named_parameters()), gates)
    F.cross_entropy(torch.func.functional_call(dense, gated, (x,)), y).backward()
    expected = torch.cat([gate.grad * narrow_model.mask[name] for name, gate in gates.items()])
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert expected.abs().max() > 1e-4


@pytest.mark.same_bits
def test_the_gate_gradient_is_summed_outside_autocast_also_when_backward_runs_inside() -> None:
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.mv:
                seen.append(torch.is_autocast_enabled("cpu"))  # CUDA casts this product, a CPU does not
            return func(*args, **(kwargs or {}))

    reader = Reader(torch.nn.Parameter(torch.randn(4, 6)), 1)
    gradient = torch.randn(4, 6)
    expected = reader.products(reader.leaf.detach(), gradient)
    with torch.autocast("cpu", dtype=torch.bfloat16), Watch():
        found = reader.products(reader.leaf.detach(), gradient)
    assert seen == [False]
    assert torch.equal(found, expected)
