"""UnitVectors: gate gradients, magnitudes and the check of the mask agree with the slow way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from narrow import X, Y, network, prepared

from sparsekit import choose, select
from sparsekit.criteria import Random, View
from sparsekit.criteria.magnitudes import unit_magnitudes


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


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.2])
def test_fused_magnitudes_are_those_of_the_dense_state_at_all_times(ratio) -> None:
    narrow_model, fused = prepared(ratio)
    optimizer = torch.optim.SGD(narrow_model.parameters(), lr=0.1)

    def check() -> None:
        state = narrow_model.dense_state()
        parameters = {name: state[name] for name in narrow_model.named_parameters()}
        expected = torch.cat([unit_magnitudes(group, parameters) for group in narrow_model.graph.groups.values()])
        assert torch.allclose(fused.magnitudes(), expected, rtol=0, atol=1e-12)

    for step in range(6):
        check()
        optimizer.zero_grad()
        F.cross_entropy(narrow_model.module(X), Y).backward()
        optimizer.step()
        check()
        other = View(generator=torch.Generator().manual_seed(step))
        fused.remask(select(Random(), narrow_model.graph, 0.7 if step == 3 else ratio, other), [optimizer])


def test_stands_agrees_with_sorting_on_random_importance() -> None:
    narrow_model, fused = prepared(0.5)
    generator = torch.Generator().manual_seed(0)
    agreed = 0
    for _ in range(200):
        importance = torch.randn(fused.total, dtype=torch.float64, generator=generator)
        importance[fused.slot_units] += 1.5
        best = choose(narrow_model.graph, fused.split(importance), narrow_model.mask.counts())
        assert fused.stands(importance) == (best == narrow_model.mask)
        agreed += fused.stands(importance)
    assert 0 < agreed < 200
