"""Activation: exact numbers, attention heads, models that cannot be seen into."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsekit as sk
from sparsekit._torch import without_fast_path
from sparsekit.criteria import Activation, Taylor, View
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
    assert criterion.work.flops == 8 * 2 * (4 * 2 * 9 * 4 + 16 * 3)


def test_heads_of_torchs_attention_are_seen() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), 1)
    x = torch.randn(6, 5, 8)
    graph = sk.trace_units(model, x[:2])
    heads = next(name for name, group in graph.groups.items() if group.kind == "head")
    view = View(model=model)
    scores = Activation([x]).scores(graph, view)
    assert all(bool((scores[name] > 0).all()) for name in graph.groups)
    signed = Taylor([(x, x)], F.mse_loss, form="signed").scores(graph, view)[heads]
    gates = {heads: torch.ones(2, requires_grad=True)}
    state = graph.gate({name: entry.detach() for name, entry in model.state_dict().items()}, gates)
    with without_fast_path():
        loss = F.mse_loss(torch.func.functional_call(model.eval(), state, (x,)), x)
    assert torch.allclose(signed, -torch.autograd.grad(loss, gates[heads])[0].double(), atol=1e-6)
    assert {type(m) for m in model.modules() if isinstance(m, nn.MultiheadAttention)} == {nn.MultiheadAttention}


def test_units_that_no_layer_reads_are_named() -> None:
    view = example_view()
    with pytest.raises(InvalidValueError, match="the units of group 'first' are not the input of a linear layer"):
        Activation([torch.randn(2, 3)]).scores(example_graph(), view)
