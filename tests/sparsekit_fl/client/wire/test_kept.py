"""Kept: gather, scatter and add are exact for unit masks, weight masks and none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsekit import trace_units
from sparsekit.graph import UnitMask, WeightMask
from sparsekit_fl.client.packing import Kept, mask_state


@pytest.fixture(scope="module")
def convolutions():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(12, 5))
    graph = trace_units(model, torch.zeros(2, 2, 6, 6))
    torch.manual_seed(0)
    masks = [UnitMask({name: torch.rand(group.size) > 0.4 for name, group in graph.groups.items()}) for _ in range(8)]
    weights = WeightMask({"0.weight": torch.rand(4, 2, 3, 3) > 0.5, "5.weight": torch.zeros(5, 12, dtype=torch.bool)})
    return graph, model.state_dict(), [*(m for m in masks if all(k.any() for k in m.values())), weights, None]


def test_scatter_undoes_gather(convolutions):
    graph, state, masks = convolutions
    for mask in masks:
        kept = Kept(graph, mask)
        again = kept.scatter_all(kept.gather_all(state), state)
        assert all(torch.equal(again[name], state[name]) for name in state)
        other = {name: torch.full_like(tensor, 9) for name, tensor in state.items()}
        partial = kept.scatter_all(kept.gather_all(state), other)
        assert all(torch.equal(a, b) for a, b in zip(kept.gather_all(partial).values(), kept.gather_all(state).values()))


def test_shapes_and_counts_are_those_of_what_is_gathered(convolutions):
    graph, state, masks = convolutions
    for mask in masks:
        kept = Kept(graph, mask)
        found = kept.gather_all(state)
        assert all(tuple(found[name].shape) == kept.shape(name) for name in state)


def test_what_a_mask_drops_becomes_zero(convolutions):
    graph, state, _ = convolutions
    mask = WeightMask({"0.weight": torch.zeros(4, 2, 3, 3, dtype=torch.bool)})
    masked = mask_state(graph, mask, state)
    assert not masked["0.weight"].any()
    assert masked["0.bias"] is state["0.bias"]
