"""A cell of `benchmarks/prune.py`: one arm at one budget with one seed, what the arm makes of it, and how all are trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from prune_tasks import Images, Schedule, Splits, Task
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.finetuning import Distillation

__all__ = ["Cell", "Cut", "accuracy", "flops_of", "train"]


@dataclass
class Cell:
    """One arm at one budget with one seed.

    Args:
        task: Model and data.
        schedule: How long everything is trained.
        data: The splits.
        dense: The pretrained model; not changed.
        share: The budget, as a share of the FLOPs of the dense model.
        seed: Random seed.
        folder: Where checkpoints of this cell go.
        budgets: All shares that are asked for of this dense model.
        shared: What cells of the same dense model have in common, by name.
    """

    task: Task
    schedule: Schedule
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

    def of_all_budgets(self) -> Cell:
        """The cell for what does not depend on the budget: its checkpoints lie beside those of the dense model."""
        return replace(self, folder=self.folder.parent)

    @property
    def example(self) -> Tensor:
        """One image."""
        return torch.zeros_like(self.data.images["train"][:1])

    def scoring(self) -> list[tuple[Tensor, Tensor]]:
        """Batches of training data for criteria, recalibration and compensation; the same for every arm."""
        loader = self.data.loader("train", self.schedule.batch, seed=1000 + self.seed)
        return [batch for _, batch in zip(range(self.schedule.score_batches), loader)]


@dataclass
class Cut:
    """What an arm made.

    Args:
        model: The small model, before any recalibration.
        compensated: The same, compensated, where the arm does so.
        teacher: Whether the dense model teaches while fine-tuning.
        scratch: Whether it starts from random weights.
        sparse_flops: Training FLOPs that were spent before the cut, without pretraining.
        notes: What else is to be said, for the file of results.
    """

    model: nn.Module
    compensated: nn.Module | None = None
    teacher: bool = False
    scratch: bool = False
    sparse_flops: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)


def flops_of(model: nn.Module, example: Tensor) -> int:
    """FLOPs of one image."""
    return sk.count_cost(model, example).flops_compact


@torch.no_grad()
def accuracy(model: nn.Module, batches: Images) -> float:
    """Share of images that are classified right."""
    model.eval()
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in batches)
    return right / batches.labels.numel()


def train(
    model: nn.Module,
    cell: Cell,
    name: str,
    epochs: int,
    rate: float,
    *,
    regularizer: Any = None,
    teacher: nn.Module | None = None,
) -> float:
    """Train in place, resumable; returns the training FLOPs (a backward pass is two forward passes)."""
    loader = cell.data.loader("train", cell.schedule.batch, seed=cell.seed, augment=cell.task.augment)
    steps = epochs * len(loader)
    sk.finetune(
        model,
        loader,
        F.cross_entropy,
        epochs=epochs,
        optimizer=lambda p: torch.optim.SGD(p, lr=rate, momentum=0.9, nesterov=True, weight_decay=cell.task.decay),
        scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, rate, total_steps=steps + 1, pct_start=0.2),
        scheduler_step="batch",
        regularizer=regularizer,
        distillation=None if teacher is None else Distillation(teacher, temperature=4.0, share=0.7),
        checkpoint=cell.folder / f"{name}.safetensors",
        seed=cell.seed,
    )
    return 3.0 * flops_of(model, cell.example) * loader.labels.numel() * epochs
