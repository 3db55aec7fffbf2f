"""Selection, width and bandit methods on a CNN, an LSTM, a VGG and a residual network of a user's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import sparsekit_fl as fl
from sparsekit_fl.methods import registry
from sparsekit_fl.problem.models.networks import Cnn, NextWordLstm, Vgg

NAMES = ("efd", "fedlps", "fedmp", "fedprox", "fedrolex", "fjord", "heterofl", "oort", "refl")


class Residual(nn.Module):
    """A stem and a block whose sum ties their channels, then an average over the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 8, 1))
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.stem(images)))
        hidden = hidden + self.block(hidden)
        return self.head(hidden.mean((2, 3)))


MODELS = {
    "cnn": (lambda: Cnn(classes=4, size=(16, 16)), lambda count: torch.randn(count, 1, 16, 16)),
    "lstm": (lambda: NextWordLstm(vocabulary=4, width=6, hidden=8), lambda count: torch.randint(0, 4, (count, 5))),
    "residual": (Residual, lambda count: torch.randn(count, 1, 8, 8)),
    "vgg": (lambda: Vgg(11, classes=4), lambda count: torch.randn(count, 3, 32, 32)),
}


def trained(name: str, model: str):
    make, draw = MODELS[model]
    torch.manual_seed(0)

    def split(count: int) -> fl.TensorData:
        inputs = draw(count)
        labels = inputs if model == "lstm" else torch.arange(count) % 4
        return fl.TensorData((inputs,), labels)

    clients = [
        fl.Client(id=k, data=fl.ClientData(train=split(6), val=split(2), test=split(2)), capability=fl.Capability(ratio=level))
        for k, level in enumerate((1.0, 0.5, 0.25))
    ]
    problem = fl.Problem(model=make, example_inputs=(draw(2),))
    training = fl.TrainingConfig(local_epochs=1, batch_size=3, lr=0.01)
    config = fl.RunConfig(rounds=2, cohort=2, training=training, eval_every=2)
    return fl.run(registry[name](), problem, clients, config)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        *((name, "residual") for name in NAMES),
        *((name, "cnn") for name in ("fedlps", "fjord")),
        *((name, "lstm") for name in ("fedlps", "fedmp", "heterofl")),
        *(pytest.param(name, "vgg", marks=pytest.mark.slow) for name in ("fedlps", "fjord", "heterofl")),
    ],
)
def test_runs_to_the_end(name, model) -> None:
    result = trained(name, model)
    assert not any(record.dropped for record in result.rounds)
    assert math.isfinite(result.final.personal["loss"])
    assert result.cost.flops_compact > 0
