"""UnitVectors: gate gradients, magnitudes and the check of the mask agree with the slow way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from narrow import X, Y, network, prepared
from torch.overrides import TorchFunctionMode

from sparsekit.training.unit_vectors import Reader


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_the_gate_gradient_is_the_derivative_of_the_loss_by_a_gate(ratio) -> None:
    narrow_model, fused = prepared(ratio)
    graph = narrow_model.graph
    F.cross_entropy(narrow_model.module(X), Y).backward()
    found = torch.zeros(fused.total, dtype=torch.float64).index_copy(0, fused.slot_units, fused.gate_gradient())
    gates = {name: keep.double().requires_grad_() for name, keep in narrow_model.mask.items()}
    dense = network()
    loss = F.cross_entropy(torch.func.functional_call(dense, graph.gate(dict(dense.named_parameters()), gates), (X,)), Y)
    loss.backward()
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
