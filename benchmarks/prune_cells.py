"""What `benchmarks/prune.py` trains and how: networks and their data, schedules, and a cell: one arm, budget and seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from nets import convolutions, resnet
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.finetuning import Distillation
from sparsekit_fl.problem.datasets import datasets


def small_resnet(blocks: int, classes: int, width: int = 16, channels: int = 3) -> nn.Module:
    """The ResNet of He et al. for images of 32 pixels, with 6·blocks + 2 layers."""
    stem = (nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    return resnet(stem, width, (blocks,) * 3, width, 1, classes)


def vgg(classes: int, *widths: int) -> nn.Module:
    """A VGG with batch norm and one linear layer; 0 among the widths is a pooling layer."""
    layers = convolutions(widths, bias=False)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


# Half the channels of VGG-11, which one core trains in minutes.
VGG11 = (32, 0, 64, 0, 128, 128, 0, 256, 256, 0, 256, 256)


@dataclass(frozen=True)
class Task:
    """A model, its data, epochs (before, after, and with a regularizer before the cut), and numbers of images.

    Images are averaged over squares of `pooled` pixels: 2 makes 16 pixels of 32, at a quarter of the FLOPs.
    """

    dataset: str
    make: Callable[[], nn.Module]
    pretrain: int
    finetune: int
    train: int
    score_batches: int
    test: int
    pooled: int = 2
    augment: bool = True


TASKS = {
    "resnet20-cifar10": Task("cifar10", lambda: small_resnet(3, 10), 6, 1, 5_000, 16, 2_000),
    "vgg11-cifar100": Task("cifar100", lambda: vgg(100, *VGG11), 15, 5, 10_000, 16, 4_000),
    "tiny-digits": Task("digits", lambda: small_resnet(2, 10, 8, channels=1), 2, 1, 400, 2, 300, 1, augment=False),
}
BATCH = 64
PRETRAIN_RATE, RATE = 0.1, 0.03


class Images:
    """Batches, shuffled and augmented by a generator of their own, which a checkpoint saves and restores."""

    def __init__(self, images: Tensor, labels: Tensor, *, seed: int | None, augment: bool = False) -> None:
        self.images, self.labels, self.augment = images, labels, augment
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return -(-self.labels.numel() // BATCH)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count = self.labels.numel()
        order = torch.arange(count) if self.generator is None else torch.randperm(count, generator=self.generator)
        for rows in order.split(BATCH):
            if self.generator is None or rows.numel() > 1:  # a batch norm refuses a single example
                yield (self._augmented(self.images[rows]) if self.augment else self.images[rows]), self.labels[rows]

    def _augmented(self, images: Tensor) -> Tensor:
        """Crop images out of a border of an eighth of their width, and flip half of them."""
        count, _, height, width = images.shape
        border = width // 8
        shift = torch.randint(0, 2 * border + 1, (2, count), generator=self.generator)
        flip = torch.rand(count, generator=self.generator) < 0.5
        padded = F.pad(images, (border, border, border, border))
        rows = shift[0][:, None] + torch.arange(height)
        columns = torch.arange(width).expand(count, width)
        columns = torch.where(flip[:, None], width - 1 - columns, columns) + shift[1][:, None]
        first = torch.arange(count)[:, None, None]
        return padded[first, :, rows[:, :, None], columns[:, None, :]].movedim(-1, 1).contiguous()


@dataclass(frozen=True)
class Splits:
    images: dict[str, Tensor]
    labels: dict[str, Tensor]

    def loader(self, split: str, *, seed: int | None = None, augment: bool = False) -> Images:
        return Images(self.images[split], self.labels[split], seed=seed, augment=augment)


def load(task: Task, root: Path | None) -> Splits:
    """Read the data of a task, normalized; a tenth of the training images is left out, for choices."""
    source = datasets[task.dataset](root)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (source.mean, source.std))
    order = torch.randperm(len(source.train), generator=torch.Generator().manual_seed(0))[: task.train * 10 // 9]
    test = torch.arange(min(len(source.test), task.test))
    parts = {"train": (source.train, order[max(1, order.numel() // 10) :]), "test": (source.test, test)}
    images = {
        name: F.avg_pool2d(((data.inputs[0][rows].float() / 255) - mean) / std, task.pooled)
        for name, (data, rows) in parts.items()
    }
    return Splits(images, {name: data.labels()[rows] for name, (data, rows) in parts.items()})


@dataclass
class Cell:
    task: Task
    data: Splits
    dense: nn.Module
    share: float
    seed: int
    folder: Path
    budgets: tuple[float, ...] = ()
    shared: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, which is called once for all cells of this dense model."""
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]

    @property
    def example(self) -> Tensor:
        return torch.zeros_like(self.data.images["train"][:1])

    def scoring(self) -> list[tuple[Tensor, Tensor]]:
        """Batches of training data for criteria, recalibration and reconstruction; the same for every arm."""
        loader = self.data.loader("train", seed=1000 + self.seed)
        return [batch for _, batch in zip(range(self.task.score_batches), loader)]


@dataclass
class Cut:
    """A small model before any recalibration, the same reconstructed, how it is trained, and training FLOPs before the cut."""

    model: nn.Module
    reconstructed: nn.Module | None = None
    teacher: bool = False
    scratch: bool = False
    notes: dict[str, Any] = field(default_factory=dict)


def flops_of(model: nn.Module, example: Tensor) -> int:
    return sk.count_cost(model, example).flops


@torch.no_grad()
def accuracy(model: nn.Module, batches: Images) -> float:
    model.eval()
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in batches)
    return right / batches.labels.numel()


def train(model: nn.Module, cell: Cell, name: str, epochs: int, rate: float, *, teacher: nn.Module | None = None) -> float:
    """Train in place, resumable; returns the training FLOPs (a backward pass is two forward passes)."""
    loader = cell.data.loader("train", seed=cell.seed, augment=cell.task.augment)
    steps = epochs * len(loader)
    sk.finetune(
        model,
        loader,
        F.cross_entropy,
        epochs=epochs,
        optimizer=lambda p: torch.optim.SGD(p, lr=rate, momentum=0.9, nesterov=True, weight_decay=5e-4),
        scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, rate, total_steps=steps + 1, pct_start=0.2),
        scheduler_step="batch",
        distillation=None if teacher is None else Distillation(teacher, temperature=4.0, share=0.7),
        checkpoint=cell.folder / f"{name}.safetensors",
        seed=cell.seed,
    )
    return 3.0 * flops_of(model, cell.example) * loader.labels.numel() * epochs
