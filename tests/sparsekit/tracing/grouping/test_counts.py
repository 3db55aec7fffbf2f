"""Layers without a parameter to read a size from: it is set where one group tells it, and units stay where none does."""

from __future__ import annotations

import torch
from torch import nn

from sparsekit.graph.groups import SizeAttribute
from sparsekit.graph.mask import UnitMask
from sparsekit.surgery.compaction import compact
from sparsekit.tracing.trace import trace_units
from sparsekit.training.narrow_model import NarrowModel
from sparsekit.training.widening import skeleton


def test_a_group_norm_without_a_scale_counts_its_groups() -> None:
    model = nn.Sequential(nn.Conv1d(1, 8, 1), nn.GroupNorm(4, 8, affine=False), nn.ReLU(), nn.Conv1d(8, 2, 1))
    graph = trace_units(model, torch.randn(2, 1, 5))
    assert set(graph.sizes) == {SizeAttribute("1", "num_groups", "0", 1), SizeAttribute("1", "num_channels", "0", 2)}
    mask = UnitMask({"0": torch.tensor([True, False, True, True])})
    assert (small := compact(model, graph, mask))[1].num_groups == 3
    assert (small[1].num_channels, small[0].out_channels) == (6, 6)
    narrow_model = NarrowModel(model, graph)
    narrow_model.remask(mask)
    assert narrow_model.module[1].num_groups == 3
    assert skeleton(narrow_model.module, graph, UnitMask.full(graph))[1].num_groups == 4
