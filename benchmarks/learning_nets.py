"""The networks and clients of `benchmarks/learning.py`: a small residual network for CIFAR-10, and EfficientNet-Lite0."""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.measure.cost import CostModel
from sparsekit_fl.problem.datasets import datasets

Data = tuple[Tensor, Tensor]
"""Images, float32 (n, 3, H, W), and classes, int64 (n,)."""
CLASSES = ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_PRETRAINED, _CLIENTS = 40_000, 47_000
"""Positions in the training set: images before the first are for pretraining, those before the second for clients, the others
for validation."""


class _Block(nn.Module):
    def __init__(self, entering: int, leaving: int) -> None:
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(entering, leaving, 3, padding=1, bias=False), nn.BatchNorm2d(leaving)
        self.c2, self.b2 = nn.Conv2d(leaving, leaving, 3, padding=1, bias=False), nn.BatchNorm2d(leaving)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.b1(F.max_pool2d(self.c1(x), 2)))
        return F.relu(x + self.b2(self.c2(x)))


class ConvNet(nn.Module):
    """Whitened patches, three blocks of 32, 96 and 128 channels, and a linear layer; 52 MFLOPs an image.

    Source: after airbench, Jordan, 94 % on CIFAR-10 in 3.29 seconds (arXiv 2404.00498).
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 2)
        self.l1, self.l2, self.l3 = _Block(24, 32), _Block(32, 96), _Block(96, 128)
        self.fc = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.l3(self.l2(self.l1(F.relu(self.stem(x))))).amax((2, 3)))


@cache
def cifar10() -> tuple[Data, Data]:
    """Return normalized training and test images."""
    source = datasets["cifar10"](os.environ.get("SPARSEKIT_DATA", "data"))
    train, test = (((pool.inputs[0].float() / 255 - 0.47) / 0.25, pool.labels()) for pool in (source.train, source.test))
    return train, test


@dataclass(frozen=True, eq=False)
class Task:
    """A trained network and a client that adapts it. Choices are made on `val`, and `test` is used once.

    `calibration` images score units and refit layers. `clip` is the largest norm of gradients, 0 for no clipping. If `frozen`,
    batch norms keep their statistics.
    """

    network: str
    model: nn.Module
    train: Data
    val: Data
    test: Data
    masked: sk.LearnableMask
    costs: CostModel
    batch: int = 32
    calibration: int = 64
    clip: float = 0.0
    frozen: bool = False

    @property
    def graph(self) -> sk.UnitGraph:
        return self.masked.graph

    @property
    def example(self) -> tuple[Tensor, ...]:
        return (self.val[0][:1],)

    def mode(self, module: nn.Module) -> None:
        module.train()
        for each in module.modules() if self.frozen else ():
            if isinstance(each, nn.BatchNorm2d):
                each.eval()


@cache
def _wrapped(build: Callable[..., nn.Module], device: str, *options: Any) -> tuple[nn.Module, sk.LearnableMask, CostModel]:
    model, example = build(*options)
    graph = sk.trace_units(model.eval(), (example,))
    model, example = model.to(device, memory_format=torch.channels_last).eval(), example.to(device)
    rule = sk.LearnedNarrowing(steps=100)
    masked = sk.LearnableMask(model, (example,), budget="flops=50%", learning=rule, graph=graph)
    return model, masked, sk.cost_model(model, example, graph=masked.graph)


def _convnet(out: Path) -> tuple[nn.Module, Tensor]:
    model = ConvNet()
    model.load_state_dict(torch.load(out / "cifar10.pt", weights_only=True))
    return model, torch.zeros(1, 3, 32, 32)


def _of_classes(data: Data, classes: list[int], each: int | None, generator: torch.Generator) -> Data:
    chosen = []
    for number in classes:
        own = (data[1] == number).nonzero().reshape(-1)
        chosen.append(own if each is None else own[torch.randperm(len(own), generator=generator)[:each]])
    return data[0][torch.cat(chosen)], data[1][torch.cat(chosen)]


def tasks(name: str, seed: int, out: Path, device: str = "cpu") -> Task:
    """Return the task of a client. `name` has names of classes of CIFAR-10, or is "turned" or "tiny".

    "turned" has all ten classes, with images turned by 90°; "tiny" has 20 classes of Tiny ImageNet, and EfficientNet-Lite0.
    """
    generator = torch.Generator().manual_seed(seed)
    if name == "tiny":
        return _tiny(seed, device)
    (x, y), test = cifar10()
    pool, held = (x[_PRETRAINED:_CLIENTS], y[_PRETRAINED:_CLIENTS]), (x[_CLIENTS:], y[_CLIENTS:])
    turned = name == "turned"
    classes = list(range(10)) if turned else [CLASSES.index(each) for each in name.split()]
    train = _of_classes(pool, classes, 75 if turned else 250, generator)
    val, test = (_of_classes(each, classes, 300 if turned else None, generator) for each in (held, test))
    if turned:
        train, val, test = ((images.rot90(1, (2, 3)), labels) for images, labels in (train, val, test))
    model, masked, costs = _wrapped(_convnet, device, out)
    return Task("ConvNet", model, *(_moved(each, device) for each in (train, val, test)), masked, costs)


def _moved(data: Data, device: str) -> Data:
    return data[0].to(device), data[1].to(device)


def _lite0(pixels: int) -> tuple[nn.Module, Tensor]:
    from real_nets import efficientnet_lite0

    network = efficientnet_lite0(pixels)
    return network.model, network.example[0]


def _tiny(seed: int, device: str, pixels: int = 64, classes: int = 20) -> Task:
    import numpy as np
    import pyarrow.parquet as parquet
    from real_nets import DATA, images

    wanted = np.random.default_rng(seed).permutation(200)[:classes]

    def part(split: str, first: int, last: int) -> Data:
        labels = np.array(parquet.read_table(DATA / "tiny_imagenet" / f"{split}.parquet", columns=["label"])["label"])
        places = np.concatenate([np.flatnonzero(labels == each)[first:last] for each in wanted])
        return images(split, sorted(places.tolist()), pixels)

    model, masked, costs = _wrapped(_lite0, device, pixels)
    parts = (_moved(part(*each), device) for each in (("train", 0, 80), ("train", 80, 100), ("valid", 0, 25)))
    return Task("EfficientNet-Lite0", model, *parts, masked, costs, clip=1.0, frozen=True)


def pretrain(out: Path, epochs: int, device: str, batch: int = 500, lr: float = 0.5) -> None:
    """Train `ConvNet` on the first 40,000 images, shifted by up to two pixels and flipped, and save it to OUT/cifar10.pt."""
    (x, y), test = cifar10()
    torch.manual_seed(0)
    model = ConvNet()
    with torch.no_grad():
        patches = x[:5000].unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = (vectors.T / (values[:, None] + 5e-4).sqrt()).reshape(12, 3, 2, 2)
        model.stem.weight.copy_(torch.cat([filters, -filters]))
        model.stem.bias.zero_()
    model.to(device, memory_format=torch.channels_last)
    model.stem.weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    steps = math.ceil(_PRETRAINED / batch) * epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.2)
    padded, y = F.pad(x[:_PRETRAINED], (2, 2, 2, 2), "reflect").to(device), y.to(device)
    channels, pixels, begin = torch.arange(3, device=device)[:, None, None], torch.arange(32, device=device), time.time()
    for epoch in range(epochs):
        model.train()
        for chosen in torch.randperm(_PRETRAINED, device=device).split(batch):
            rows, columns = (pixels + torch.randint(0, 5, (len(chosen), 1), device=device) for _ in range(2))
            images = padded[chosen[:, None, None, None], channels, rows[:, None, :, None], columns[:, None, None, :]]
            flipped = torch.rand(len(chosen), 1, 1, 1, device=device) < 0.5
            images = torch.where(flipped, images.flip(3), images).contiguous(memory_format=torch.channels_last)
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                outputs = model(images)
            optimizer.zero_grad()
            F.cross_entropy(outputs.float(), y[chosen], label_smoothing=0.1).backward()
            optimizer.step()
            schedule.step()
        torch.save({name: tensor.cpu() for name, tensor in model.state_dict().items()}, out / "cifar10.pt")
        print(f"epoch {epoch + 1} of {epochs}, {time.time() - begin:.0f} s", flush=True)
    model.eval()
    with torch.no_grad():
        right = [(model(a.to(device)).argmax(1).cpu() == b).float() for a, b in zip(test[0].split(500), test[1].split(500))]
    print(f"accuracy on test: {float(torch.cat(right).mean()):.4f}")
