"""FLOPs by the paper's convention, and of a part of a model."""

from __future__ import annotations

import torch
from torch import nn

import sparsekit as sk
from sparsekit.measure.cost import CostModel, trace_cost
from sparsekit_fl.client.costs import part_flops, rowmask_flops


def _mlp() -> CostModel:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    x = torch.zeros(5, 4)
    return trace_cost(model, x, graph=sk.trace_units(model, x))


def test_each_bias_entry_adds_one_flop_per_position() -> None:
    assert rowmask_flops(_mlp()) == 2 * (4 * 6 + 6 * 3) + 6 + 3


def test_a_unit_mask_saves_rows_and_no_columns() -> None:
    mask = sk.UnitMask({"0": torch.tensor([True, False, True, False, False, False])})
    assert rowmask_flops(_mlp(), mask) == 2 * (4 * 2 + 6 * 3) + 6 + 3


def test_a_weight_mask_counts_its_own_entries() -> None:
    keep = torch.zeros(6, 4, dtype=torch.bool)
    keep[0] = True
    assert rowmask_flops(_mlp(), sk.WeightMask({"0.weight": keep})) == 2 * (4 + 18) + 9


def test_the_flops_of_a_part_are_those_of_its_weights() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 9, 5)
    )
    x = torch.zeros(3, 2, 6, 6)
    costs = trace_cost(model, x, graph=sk.trace_units(model, x))
    convolution, linear = 2 * 36 * 4 * 2 * 9, 2 * 36 * 5
    assert part_flops(costs, {"0.weight"}) == convolution
    assert part_flops(costs, {"5.weight", "5.bias", "1.weight"}) == linear
    assert part_flops(costs, {"0.weight"}, bias=True) == convolution + 36 * 4
    assert part_flops(costs, model.state_dict()) == costs.forward_flops() == convolution + linear
    assert part_flops(costs, model.state_dict(), bias=True) == rowmask_flops(costs)
    assert part_flops(costs, ()) == 0
