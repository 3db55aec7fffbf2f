"""The arms of `benchmarks/prune.py`: how a dense model becomes a small one, by sparsekit and by Torch-Pruning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from prune_tasks import Images, Schedule, Splits, Task
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.criteria import Fisher, Magnitude, Normalised, Taylor
from sparsekit.finetuning import Distillation, GroupSL

__all__ = ["ARMS", "Cell", "Cut", "accuracy", "flops_of", "train"]


@dataclass
class Cell:
    """One arm at one budget with one seed.

    Args:
        task: Model and data.
        schedule: How long everything is trained.
        data: The splits.
        dense: The pretrained model; not changed.
        share: The budget, as a share of the FLOPs of the dense model.
        seed: Of everything that is drawn.
        folder: Where checkpoints of this cell go.
    """

    task: Task
    schedule: Schedule
    data: Splits
    dense: nn.Module
    share: float
    seed: int
    folder: Path

    @property
    def example(self) -> Tensor:
        """One image."""
        return torch.zeros(1, *self.task.example, device=self.data.labels["train"].device)

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


def _ours(cell: Cell, criterion: Any, allocation: str = "by_cost", dense: nn.Module | None = None) -> Any:
    return sk.prune(
        cell.dense if dense is None else dense,
        (cell.example,),
        budget={"flops": f"{100 * cell.share:g}%"},
        criterion=criterion,
        allocation=allocation,
    )


def _criteria(cell: Cell) -> dict[str, Any]:
    batches = cell.scoring()
    return {
        "fisher": Fisher(batches, F.cross_entropy),
        "taylor": Taylor(batches, F.cross_entropy),
        "taylor products": Taylor(batches, F.cross_entropy, form="products"),
        "magnitude": Normalised(Magnitude(order=2, coupled=True)),
    }


def _by_criterion(name: str, allocation: str = "by_cost") -> Callable[[Cell], Cut]:
    def arm(cell: Cell) -> Cut:
        pruned = _ours(cell, _criteria(cell)[name], allocation)
        return Cut(pruned.model, notes={"widths": pruned.mask.counts()})

    return arm


def _compensated(cell: Cell, pruned: Any) -> nn.Module:
    small = copy.deepcopy(pruned.model)
    sk.compensate(cell.dense, small, pruned.graph, pruned.mask, cell.scoring())
    return small


def _best(cell: Cell) -> tuple[str, Any, nn.Module]:
    """The criterion and the allocation with the highest accuracy on validation, compensated and recalibrated, not trained."""
    found = []
    for allocation in ("by_cost", "isomorphic"):
        for name, criterion in _criteria(cell).items():
            pruned = _ours(cell, criterion, allocation)
            small = _compensated(cell, pruned)
            tried = copy.deepcopy(small)
            sk.recalibrate(tried, cell.scoring())
            score = accuracy(tried, cell.data.loader("validation", 500))
            found.append((score, f"{name}, {allocation}", pruned, small))
    _, name, pruned, small = max(found, key=lambda item: item[0])
    return name, pruned, small


def ours(cell: Cell) -> Cut:
    """Criterion and allocation chosen on validation, consumers compensated, the dense model as a teacher."""
    name, pruned, small = _best(cell)
    return Cut(pruned.model, small, teacher=True, notes={"chosen": name, "widths": pruned.mask.counts()})


def ours_without_teacher(cell: Cell) -> Cut:
    """The same, fine-tuned on labels alone, as the rivals are."""
    found = ours(cell)
    found.teacher = False
    return found


def ours_group_sl(cell: Cell) -> Cut:
    """Sparse training by our GroupSL, then magnitudes by cost."""
    dense = copy.deepcopy(cell.dense)
    graph = sk.trace_units(dense.eval(), cell.example)
    spent = train(dense, cell, "sparse", cell.schedule.sparse, cell.schedule.rates[2], regularizer=GroupSL(graph, 5e-4))
    pruned = _ours(cell, Normalised(Magnitude(order=2, coupled=True)), dense=dense)
    return Cut(pruned.model, sparse_flops=spent, notes={"widths": pruned.mask.counts()})


def _reset(model: nn.Module, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return model


def scratch_uniform(cell: Cell) -> Cut:
    """A uniformly narrow network from random weights."""
    pruned = _ours(cell, "magnitude", "uniform_within")
    return Cut(_reset(pruned.model, cell.seed), scratch=True, notes={"widths": pruned.mask.counts()})


def scratch_ours(cell: Cell) -> Cut:
    """Random weights in the widths that `ours` has found."""
    name, pruned, _ = _best(cell)
    return Cut(_reset(pruned.model, cell.seed), scratch=True, notes={"chosen": name, "widths": pruned.mask.counts()})


def _head(model: nn.Module) -> nn.Module:
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1]


def _torch_pruning(kind: str, *, is_global: bool, isomorphic: bool = False, gradients: bool = False) -> Callable[[Cell], Cut]:
    """Torch-Pruning as its own reproduction script does it: small steps until the FLOPs are met."""

    def arm(cell: Cell) -> Cut:
        import torch_pruning as tp

        model = copy.deepcopy(cell.dense).eval()
        spent, notes = 0.0, {}
        importances = {
            "magnitude": lambda: tp.importance.MagnitudeImportance(p=2),
            "taylor": lambda: tp.importance.TaylorImportance(),
            "group": lambda: tp.importance.GroupMagnitudeImportance(p=2, normalizer="max"),
        }
        maker = tp.pruner.GroupNormPruner if kind == "group" else tp.pruner.BasePruner
        options: dict[str, Any] = {"reg": 5e-4} if kind == "group" else {}

        def make(target: nn.Module) -> Any:
            return maker(
                target,
                cell.example,
                importance=importances[kind](),
                global_pruning=is_global,
                isomorphic=isomorphic,
                pruning_ratio=1.0,
                max_pruning_ratio=1.0,
                iterative_steps=400,
                ignored_layers=[_head(target)],
                **options,
            )

        if kind == "group":
            pruner = make(model)
            pruner.update_regularizer()
            spent = train(model, cell, "sparse", cell.schedule.sparse, cell.schedule.rates[2], regularizer=_Regularize(pruner))
            model.eval()
        pruner = make(model)
        limit = cell.share * flops_of(cell.dense, cell.example)
        for step in range(400):
            if gradients and step % 10 == 0:
                model.zero_grad()
                for x, y in cell.scoring():
                    F.cross_entropy(model(x), y).backward()
            pruner.step()
            if flops_of(model, cell.example) <= limit:
                break
            if gradients and step % 10 != 9:
                _keep_gradients(model)
        notes["steps"] = step + 1
        model.zero_grad()
        return Cut(model, sparse_flops=spent, notes=notes)

    return arm


def _keep_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is None or parameter.grad.shape != parameter.shape:
            parameter.grad = torch.zeros_like(parameter)


class _Regularize:
    """The library's regulariser in the place of ours."""

    def __init__(self, pruner: Any) -> None:
        self.pruner = pruner

    def add_gradients(self, model: nn.Module) -> None:
        self.pruner.regularize(model, alpha=2**4)

    def end_epoch(self) -> None:
        self.pruner.update_regularizer()

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        pass


ARMS: dict[str, Callable[[Cell], Cut]] = {
    "ours": ours,
    "ours, no teacher": ours_without_teacher,
    "ours: fisher": _by_criterion("fisher"),
    "ours: taylor": _by_criterion("taylor"),
    "ours: magnitude": _by_criterion("magnitude"),
    "ours: group-sl": ours_group_sl,
    "torch-pruning: L2": _torch_pruning("magnitude", is_global=False),
    "torch-pruning: L2, global": _torch_pruning("magnitude", is_global=True),
    "torch-pruning: L2, isomorphic": _torch_pruning("magnitude", is_global=True, isomorphic=True),
    "torch-pruning: taylor": _torch_pruning("taylor", is_global=True, gradients=True),
    "torch-pruning: group-sl": _torch_pruning("group", is_global=True),
    "scratch, uniform": scratch_uniform,
    "scratch, our widths": scratch_ours,
}
