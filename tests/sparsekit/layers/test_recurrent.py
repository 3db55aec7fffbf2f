"""Units of recurrent layers: slices of a projected LSTM, states that are passed in, layers of one unit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from zoo_base import Lambda

from sparsekit.errors import InvalidValueError, NoUnitsError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.surgery.compaction import compact
from sparsekit.tracing.trace import FixedUnitsWarning, trace_units


def slices(graph: UnitGraph, group: str) -> dict[tuple[str, int], tuple[str, bool, int]]:
    return {(s.name, s.dim): (s.side, s.gated, s.span) for s in graph.groups[group].slices}


def behind(rnn: nn.Module, width: int) -> nn.Module:
    return Lambda(lambda m, x: m.head(m.rnn(x)[0]), rnn=rnn, head=nn.Linear(width, 2))


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_a_projected_lstm_has_cells_and_projected_units() -> None:
    graph = trace_units(behind(nn.LSTM(3, 6, proj_size=2), 2), torch.randn(5, 2, 3))
    assert slices(graph, "rnn") == {
        ("rnn.weight_ih_l0", 0): ("out", False, 4),
        ("rnn.weight_hh_l0", 0): ("out", False, 4),
        ("rnn.bias_ih_l0", 0): ("out", False, 4),
        ("rnn.bias_hh_l0", 0): ("out", False, 4),
        ("rnn.weight_hr_l0", 1): ("in", True, 1),
    }
    assert slices(graph, "rnn#2") == {
        ("rnn.weight_hr_l0", 0): ("out", False, 1),
        ("rnn.weight_hh_l0", 1): ("in", True, 1),
        ("head.weight", 1): ("in", True, 1),
    }


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_a_cut_sets_both_sizes() -> None:
    model = behind(nn.LSTM(3, 6, num_layers=2, proj_size=4), 4)
    graph = trace_units(model, torch.randn(5, 2, 3))
    mask = UnitMask({name: torch.arange(group.size) < group.size - 1 for name, group in graph.groups.items()})
    small = compact(model, graph, mask)
    assert (small.rnn.hidden_size, small.rnn.proj_size, small.head.in_features) == (5, 3, 3)
    keep = {name: torch.arange(group.size) < 3 for name, group in graph.groups.items()}
    with pytest.raises(InvalidValueError, match="must keep equally many units"):
        compact(model, graph, UnitMask({**keep, "rnn": torch.arange(6) < 2}))


@pytest.mark.parametrize("rnn", [nn.RNN(3, 1), nn.RNN(3, 1, num_layers=2, bidirectional=True), nn.LSTM(3, 1), nn.GRU(3, 1)])
def test_a_layer_of_one_unit_has_none_to_give(rnn: nn.RNNBase) -> None:
    width = 2 if rnn.bidirectional else 1
    model = Lambda(lambda m, x: m.head(torch.tanh(m.up(m.rnn(x)[0]))), rnn=rnn, up=nn.Linear(width, 4), head=nn.Linear(4, 2))
    assert list(trace_units(model, torch.randn(5, 2, 3)).groups) == ["up"]
    cell = Lambda(lambda m, x: m.head(m.up(m.cell(x)).relu()), cell=nn.GRUCell(3, 1), up=nn.Linear(1, 4), head=nn.Linear(4, 2))
    assert list(trace_units(cell, torch.randn(5, 3)).groups) == ["up"]


@pytest.fixture(autouse=True)
def _no_fixed_units_unless_expected() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FixedUnitsWarning)
        yield


def test_a_state_that_the_caller_passes_in_keeps_the_units_whole() -> None:
    model = Lambda(lambda m, x, h: m.head(m.rnn(x, h)[0]), rnn=nn.GRU(3, 6), head=nn.Linear(6, 2))
    with pytest.warns(FixedUnitsWarning, match="starts from a state that is passed in"), pytest.raises(NoUnitsError):
        trace_units(model, torch.randn(5, 2, 3), torch.randn(1, 2, 6))


@pytest.mark.parametrize("own", [nn.LSTM, nn.GRU])
def test_a_computed_weight_keeps_the_layer_whole_and_is_named_once(own: Any) -> None:
    rnn = nn.utils.parametrizations.weight_norm(own(3, 6), "weight_hh_l0")
    model = Lambda(lambda m, x: m.head(torch.tanh(m.up(m.rnn(x)[0]))), rnn=rnn, up=nn.Linear(6, 4), head=nn.Linear(4, 2))
    with pytest.warns(FixedUnitsWarning) as caught:
        graph = trace_units(model, torch.randn(5, 2, 3))
    assert list(graph.groups) == ["up"]
    assert len([w for w in caught if "computed weights (weight_hh_l0)" in str(w.message)]) == 1
