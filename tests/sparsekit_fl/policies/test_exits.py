"""Exits find their places in any chain, stop there, and say what is missing elsewhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsekit.errors import InvalidValueError
from sparsekit_fl.policies.exits import place_exits
from sparsekit_fl.problem.models.cnn import Cnn
from sparsekit_fl.problem.models.lstm import NextWordLstm
from sparsekit_fl.problem.models.vgg import vgg11


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.left = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.right = nn.Conv2d(8, 8, 1, stride=2)
        self.tail = nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x).relu()
        x = (self.left(x) + self.right(x)).relu()
        return self.last((x + self.tail(x)).relu().mean((2, 3)))


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(3, 4))

    def forward(self, x):
        return F.linear(F.linear(x, self.a).relu(), self.b)


CASES = {
    "cnn": (Cnn, (torch.zeros(2, 1, 28, 28),), ("conv2", "fc1"), (2, 10)),
    "vgg": (vgg11, (torch.zeros(2, 3, 32, 32),), ("features.4", "features.8", "features.15", "features.22"), (2, 10)),
    "lstm": (lambda: NextWordLstm(50, 20, 30), (torch.zeros(2, 9, dtype=torch.int64),), ("lstm2",), (2, 9, 50)),
    "residual": (Residual, (torch.zeros(2, 3, 8, 8),), ("tail",), (2, 5)),
    "flat": (lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))), (torch.zeros(2, 6),), ("1",), (2, 6)),
    "two": (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), (torch.zeros(2, 6),), ("2",), (2, 3)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.same_bits
def test_places_and_outputs(name) -> None:
    build, inputs, places, shape = CASES[name]
    model = place_exits(build(), inputs)
    assert model._places == places
    outputs = model.outputs(*inputs)
    assert [tuple(output.shape) for output in outputs] == [shape] * model.depth
    model.eval()
    outputs = model.outputs(*inputs)
    assert torch.allclose(model(*inputs), torch.stack(outputs).mean(0))
    # The last output is the model's own.
    assert torch.equal(outputs[-1], model.model(*inputs))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nothing_behind_an_exit_is_run_or_differentiated(depth) -> None:
    model = place_exits(Cnn(), (torch.zeros(2, 1, 28, 28),))
    called = []
    for layer in ("conv1", "conv2", "fc1", "fc2"):
        getattr(model.model, layer).register_forward_hook(lambda *_, layer=layer: called.append(layer))
    outputs = model.outputs(torch.randn(2, 1, 28, 28), depth=depth)
    assert len(outputs) == depth
    assert called == ["conv1", "conv2", "fc1", "fc2"][: {1: 1, 2: 2, 3: 4}[depth]]
    torch.stack(outputs).sum().backward()
    trained = {name.split(".")[1] for name, value in model.model.named_parameters(prefix="model") if value.grad is not None}
    assert trained == set(called)
    assert [head.linear.weight.grad is not None for head in model.exits] == [k < depth for k in range(2)]


@pytest.mark.parametrize(
    ("model", "inputs", "reason"),
    [
        (nn.Linear(6, 3), torch.zeros(2, 6), "no place for an exit"),
        (Functional(), torch.zeros(2, 6), "no place for an exit"),
        (nn.LSTM(6, 3), torch.zeros(2, 4, 6), "one tensor"),
    ],
)
def test_models_without_a_place_are_refused(model, inputs, reason) -> None:
    with pytest.raises(InvalidValueError, match=reason):
        place_exits(model, (inputs,))
