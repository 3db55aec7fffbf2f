"""Weights that are computed: where gates of a normed weight act, and which weights keep their units."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations

from sparsekit.tracing.trace import trace_units


def test_a_normed_weight_is_cut_in_length_and_direction_and_gated_so_that_no_direction_is_zero() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), parametrizations.weight_norm(nn.Linear(6, 5)), nn.Linear(5, 2))
    graph = trace_units(model, torch.randn(4, 3), norm="kept")
    weight = "2.parametrizations.weight.original"
    first = {(s.name, s.dim): s.gated for s in graph.groups["0"].slices}
    assert first == {("0.weight", 0): False, ("0.bias", 0): False, (f"{weight}1", 1): True}
    second = {(s.name, s.dim): (s.side, s.gated) for s in graph.groups["2"].slices}
    assert second == {
        (f"{weight}0", 0): ("out", False),
        (f"{weight}1", 0): ("out", False),
        ("2.bias", 0): ("out", False),
        ("3.weight", 1): ("in", True),
    }
