"""The cells of `choice.py`: planted units, where the best set is known, and images, where it is not."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from nets import convolutions
from torch import Tensor, nn

from sparsekit_fl.problem.datasets import datasets

__all__ = ["PLANTED", "TASKS", "Cell", "images", "planted", "task"]


@dataclass(frozen=True, eq=False)
class Cell:
    """A model, its data and, for planted units, the best set: group name → its units."""

    model: nn.Module
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    lr: float
    good: dict[str, set[int]]
    batch: int = 64

    def batches(self, steps: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled batches, epoch after epoch."""
        x, y = self.train
        order = torch.empty(0, dtype=torch.int64)
        for _ in range(steps):
            if order.numel() < self.batch:
                order = torch.randperm(len(x), generator=generator)
            at, order = order[: self.batch], order[self.batch :]
            yield x[at.to(x.device)], y[at.to(x.device)]


class _Cells(nn.Module):
    """An LSTM of which cell j reads input j alone, and a head."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(units, units, batch_first=True)
        with torch.no_grad():
            self.lstm.weight_hh_l0.zero_()
            self.lstm.weight_ih_l0.copy_(torch.eye(units).repeat(4, 1))
        self.lstm.requires_grad_(False)
        self.head = nn.Linear(units, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class _Heads(nn.Module):
    """Attention of which head j reads inputs 2j and 2j + 1 alone, and a classifier."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(2 * heads, heads, batch_first=True)
        with torch.no_grad():
            self.attention.in_proj_weight.copy_(torch.eye(2 * heads).repeat(3, 1))
            self.attention.in_proj_bias.zero_()
        self.attention.in_proj_weight.requires_grad_(False)
        self.attention.in_proj_bias.requires_grad_(False)
        self.head = nn.Linear(2 * heads, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.attention(x, x, x, need_weights=False)[0]).mean(1))


def _linear(units: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(units, units, bias=False), nn.ReLU(), nn.Linear(units, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(units))
    model[0].requires_grad_(False)
    return model


def _convolution(units: int) -> nn.Module:
    first = nn.Conv2d(units, units, 1, bias=False)
    with torch.no_grad():
        first.weight.copy_(torch.eye(units)[:, :, None, None])
    first.requires_grad_(False)
    after = (nn.ReLU(), nn.Conv2d(units, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    return nn.Sequential(first, *after)


PLANTED: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...], int, str, float]] = {
    "linear": (_linear, (), 1, "0", 0.2),
    "convolution": (_convolution, (4, 4), 1, "0", 0.1),
    "lstm": (_Cells, (5,), 1, "lstm", 0.5),
    "heads": (_Heads, (4,), 2, "attention", 0.2),
}
"""Family → model of a number of units, extra axes of the input, inputs per unit, start of the group's name, learning rate."""


def planted(family: str, seed: int, device: str) -> Cell:
    """A quarter of the units see the signal, each a part of its own, so that no other set can do without one of them."""
    make, axes, inputs, name, lr = PLANTED[family]
    units = 8 if family == "heads" else 16
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = make(units)
    good = torch.randperm(units, generator=generator)[: units // 4]
    seen = torch.cat([good * inputs + i for i in range(inputs)])
    width = units * inputs
    level = torch.randn(6000, width, generator=generator)
    x = level.reshape(6000, width, *[1] * len(axes)).expand(-1, -1, *axes)
    x = x + 0.5 * torch.randn(x.shape, generator=generator)
    if family in ("lstm", "heads"):
        x = x.transpose(1, 2)
    signal = level[:, seen].relu().sum(1)
    y = (signal > signal.median()).long()
    x, y = x.contiguous().to(device), y.to(device)
    return Cell(model.to(device), (x[:4000], y[:4000]), (x[4000:], y[4000:]), lr, {name: set(good.tolist())})


def _read(name: str, split: str, count: int) -> tuple[Tensor, Tensor]:
    """The first images of a data set, each channel of mean 0 and deviation 1, and their labels."""
    data = getattr(datasets[name](Path(os.environ.get("SPARSEKIT_DATA", "../shared/data"))), split)
    x = data.inputs[0][:count].float() / 255
    mean, deviation = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    return (x - mean) / deviation, data.labels()[:count]


def _small(classes: int) -> nn.Module:
    """Three convolutions of 64, 128 and 128 channels."""
    layers = convolutions((64, 0, 128, 0, 128), bias=False)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, classes))


def images(name: str, seed: int, device: str, *, train: int, test: int, pooled: int = 1) -> Cell:
    """The small network on the first images of CIFAR-10 or CIFAR-100, averaged over squares of `pooled` pixels."""
    torch.manual_seed(seed)
    model = _small(100 if name == "cifar100" else 10).to(device)
    (x, y), (xt, yt) = _read(name, "train", train), _read(name, "test", test)
    x, xt = (F.avg_pool2d(pictures, pooled) for pictures in (x, xt))
    return Cell(model, (x.to(device), y.to(device)), (xt.to(device), yt.to(device)), 0.05, {})


class _Rows(nn.Module):
    """A transformer of two layers, with sixteen heads of four channels each, over the rows of an image."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.enter, self.places = nn.Linear(28, 64), nn.Parameter(0.02 * torch.randn(1, 28, 64))
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(64, 16, 128, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2))
        )
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.enter(x.squeeze(1)) + self.places).mean(1))


TASKS = {
    "classes": "three classes of ten: most units of a network of CIFAR-10 were made for the others",
    "distractor": "one of two images, in channels of their own: half of the units were made for the other one",
    "heads": "sixteen heads a layer over the rows of MNIST, where few would do",
}
"""Name → why a choice should matter: what a network was trained for, and what it is cut for, differ."""


def task(name: str, seed: int, device: str, *, train: int, test: int) -> tuple[Cell, Cell]:
    """What the dense network is trained on, and what it is cut for and trained on afterwards."""
    source = "mnist" if name == "heads" else "cifar10"
    whole = [_read(source, part, count) for part, count in (("train", train), ("test", test))]
    torch.manual_seed(seed)
    model, lr = (_Rows(10), 0.1) if name == "heads" else (_small(10), 0.05)
    if name != "heads":
        whole = [(F.avg_pool2d(x, 2), y) for x, y in whole]
    own = [(x[y < 3], y[y < 3]) for x, y in whole] if name == "classes" else whole
    if name == "distractor":
        model = _small(20)
        model[0] = nn.Conv2d(6, 64, 3, padding=1, bias=False)
        generator = torch.Generator().manual_seed(seed)
        others = [torch.randperm(len(x), generator=generator) for x, _ in whole]
        own = [(torch.cat([x, x[other]], 1), y) for (x, y), other in zip(whole, others)]
        (both, y), tested = own
        asked = torch.rand(len(y), generator=generator) < 0.5  # which of the two is asked for; the logits of both are learned
        whole = [(both, torch.where(asked, y, y[others[0]] + 10)), tested]
    return tuple(  # type: ignore[return-value]
        Cell(model.to(device), (a.to(device), b.to(device)), (c.to(device), d.to(device)), lr, {})
        for (a, b), (c, d) in (whole, own)
    )
