"""GroupSL: exact gradients on three units, and its effect on training."""

import pytest
import torch
from torch import nn

import sparsekit as sk
from sparsekit.errors import ForeignMaskError, InvalidValueError
from sparsekit.finetuning import GroupSL


def test_the_smallest_unit_decays_most() -> None:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[2.0, 2.0], [1.0, 2.0], [0.0, 0.0]]))
        model[1].weight.copy_(torch.tensor([[1.0, 2.0, 1.0]]))
    graph = sk.trace_units(model, torch.randn(1, 2))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    GroupSL(graph, 0.1).add_gradients(model)  # norms 3, 3, 1
    assert torch.allclose(model[0].weight.grad, 0.1 * model[0].weight.detach())
    assert torch.allclose(model[1].weight.grad, 0.1 * torch.tensor([[1.0, 2.0, 16.0]]))
    with pytest.raises(ForeignMaskError, match="does not have the shape"):
        GroupSL(graph).add_gradients(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)))
    with pytest.raises(InvalidValueError, match="alpha must be"):
        GroupSL(graph, alpha=-1.0)
