"""Units of recurrent layers: states that are passed in, layers of one unit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from zoo_base import Lambda

from sparsekit.errors import NoUnitsError
from sparsekit.tracing.trace import FixedUnitsWarning, trace_units


def behind(rnn: nn.Module, width: int) -> nn.Module:
    return Lambda(lambda m, x: m.head(m.rnn(x)[0]), rnn=rnn, head=nn.Linear(width, 2))


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
