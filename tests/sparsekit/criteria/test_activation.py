"""Activation: exact numbers, attention heads, models that cannot be seen into."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparsekit as sk
from sparsekit.criteria import Activation, View
from sparsekit.errors import InvalidValueError
from sparsekit.testing.criteria import example_graph, example_view


@pytest.mark.parametrize("order", [1, 2])
def test_weights_are_multiplied_by_the_root_mean_square_of_what_they_read(order: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4, 3))
    graph = sk.trace_units(model, torch.randn(1, 2, 4, 4))
    batches = [(torch.randn(3, 2, 4, 4), None), (torch.randn(5, 2, 4, 4), None)]
    inputs = model[:3](torch.cat([x for x, _ in batches])).detach()
    terms = model[3].weight.detach().abs() * inputs.square().mean(0).sqrt()
    columns = terms.sum(0) if order == 1 else terms.square().sum(0)
    expected = columns.reshape(4, 4).sum(1)
    criterion = Activation(batches, order=order)  # type: ignore[arg-type]
    found = criterion.scores(graph, View(model=model))["0"]
    assert torch.allclose(found, (expected if order == 1 else expected.sqrt()).double(), rtol=1e-5)


def test_units_that_no_layer_reads_are_named() -> None:
    view = example_view()
    with pytest.raises(InvalidValueError, match="the units of group 'first' are not the input of a linear layer"):
        Activation([torch.randn(2, 3)]).scores(example_graph(), view)
