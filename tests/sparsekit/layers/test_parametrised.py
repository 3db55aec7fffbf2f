"""Weights that are computed: where gates of a normed weight act, and which weights keep their units."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from sparsekit.tracing.trace import FixedUnitsWarning, trace_units


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


@pytest.mark.parametrize("make", [parametrizations.spectral_norm, parametrizations.orthogonal])
def test_what_depends_on_all_its_entries_stays_and_is_warned_of_once(make: object) -> None:
    model = nn.Sequential(make(nn.Linear(3, 6)), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))  # type: ignore[operator]
    with pytest.warns(FixedUnitsWarning) as caught:
        graph = trace_units(model, torch.randn(4, 3))
    messages = [str(w.message) for w in caught]
    assert list(graph.groups) == ["2"]
    assert len(messages) == 1
    assert messages[0].startswith("'0' (6 units) kept whole")
    assert [(item.module, item.size) for item in graph.fixed if item.module == "0"] == [("0", 6)]
