"""Pruning side by side: sparsekit, Torch-Pruning and narrow networks from scratch, on equal FLOPs and equal data.

    python benchmarks/prune.py --task resnet20-cifar10 --out prune.jsonl
    python benchmarks/prune.py --out prune.jsonl --table            print the tables of the file

Every result is written as soon as it is measured. Another call continues where the previous one stopped, even within a training
run. One dense model per task and seed is pretrained for all arms and budgets. Test accuracy is measured right after pruning,
after reconstruction if the arm has it, after recalibration of batch norms, and after the last epoch of fine-tuning. Networks
from scratch train for as many epochs as pretraining and fine-tuning together; `training_flops` is the total of each arm,
pretraining included.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import add, mask_of, options_of, read, show, spread
from nets import convolutions, resnet
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.finetuning import Distillation
from sparsekit_fl.problem.datasets import datasets


def small_resnet(blocks: int, classes: int, width: int = 16, channels: int = 3) -> nn.Module:
    """Return the ResNet of He et al. for images of 32 pixels, with 6·blocks + 2 layers."""
    stem = (nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    return resnet(stem, width, (blocks,) * 3, width, 1, classes)


def vgg(classes: int, *widths: int) -> nn.Module:
    """Return a VGG with batch norm and one linear layer; a width of 0 is a pooling layer."""
    layers = convolutions(widths, bias=False)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


# Half the channels of VGG-11, which one core trains in minutes.
VGG11 = (32, 0, 64, 0, 128, 128, 0, 256, 256, 0, 256, 256)


@dataclass(frozen=True)
class Task:
    """A model, its data, numbers of epochs (pretraining and fine-tuning), and numbers of images and scoring batches.

    Images are average-pooled by `pooled`: 2 turns 32 pixels into 16, at a quarter of the FLOPs.
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


Splits = dict[str, tuple[Tensor, Tensor]]
"""Split → images and labels."""


class Images:
    """Batches, shuffled and augmented with a separate generator, which checkpoints save and restore."""

    def __init__(self, images: Tensor, labels: Tensor, *, seed: int | None = None, augment: bool = False) -> None:
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
        """Pad images by an eighth of their width, crop them at random, and flip half of them."""
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


def load(task: Task, root: Path | None) -> Splits:
    """Read the data of a task, normalized; a tenth of the training images is held out for choices."""
    source = datasets[task.dataset](root)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (source.mean, source.std))
    order = torch.randperm(len(source.train), generator=torch.Generator().manual_seed(0))[: task.train * 10 // 9]
    test = torch.arange(min(len(source.test), task.test))
    parts = {"train": (source.train, order[max(1, order.numel() // 10) :]), "test": (source.test, test)}
    images = {
        name: F.avg_pool2d(((data.inputs[0][rows].float() / 255) - mean) / std, task.pooled)
        for name, (data, rows) in parts.items()
    }
    return {name: (images[name], data.labels()[rows]) for name, (data, rows) in parts.items()}


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
        """Return the result of `make`, which is called only once for all cells of this dense model."""
        if name not in self.shared:
            self.shared[name] = make()
        return self.shared[name]

    @property
    def example(self) -> Tensor:
        return torch.zeros_like(self.data["train"][0][:1])

    def scoring(self) -> list[tuple[Tensor, Tensor]]:
        """Return batches of training data for criteria, recalibration and reconstruction; the same for every arm."""
        loader = Images(*self.data["train"], seed=1000 + self.seed)
        return [batch for _, batch in zip(range(self.task.score_batches), loader)]


@dataclass
class Cut:
    """A pruned model before any correction, the same model reconstructed, and whether it has a teacher or is from scratch."""

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
    """Train in place, resuming from a checkpoint; return the training FLOPs (a backward pass is two forward passes)."""
    loader = Images(*cell.data["train"], seed=cell.seed, augment=cell.task.augment)
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


def _cut(cell: Cell, **options: Any) -> Any:
    return sk.prune(cell.dense, (cell.example,), budget={"flops": f"{100 * cell.share:g}%"}, **options)


def _default(cell: Cell) -> tuple[Any, nn.Module]:
    """Prune as `sk.prune` does by default with batches, in parts that are scored: removal by Fisher scores, and refit."""

    def find() -> tuple[Any, nn.Module]:
        batches = cell.once("batches", cell.scoring)
        pruned = _cut(cell, batches=batches, loss=F.cross_entropy, reconstruct=False, multiple_of=1, criterion="fisher")
        small = copy.deepcopy(pruned.model)
        sk.reconstruct(cell.dense, small, pruned.graph, pruned.mask, batches)
        return pruned, small

    pruned, small = cell.once(f"default at {cell.share:g}", find)
    return pruned, copy.deepcopy(small)


def ours(cell: Cell, *, teacher: bool = False) -> Cut:
    """Prune with our default; with `teacher`, the dense model teaches, while other arms are fine-tuned on labels only."""
    pruned, small = _default(cell)
    return Cut(copy.deepcopy(pruned.model), small, teacher=teacher, notes={"widths": pruned.mask.counts()})


def _reset(model: nn.Module, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return model


def scratch(cell: Cell, *, uniform: bool = False) -> Cut:
    pruned = _cut(cell, criterion="magnitude", allocation="uniform") if uniform else _default(cell)[0]
    small = _reset(copy.deepcopy(pruned.model), cell.seed)
    return Cut(small, scratch=True, notes={"widths": pruned.mask.counts()})


_STEPS = 400


def torch_pruning(cell: Cell) -> Cut:
    """Prune by L2 norms in small steps until the FLOPs are met, as in Torch-Pruning's script; one run serves all budgets."""

    def walk() -> dict[float, Cut]:
        import torch_pruning as tp

        model = copy.deepcopy(cell.dense).eval()
        last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]
        importance = tp.importance.MagnitudeImportance(p=2)
        pruner = tp.pruner.BasePruner(
            model,
            cell.example,
            importance,
            pruning_ratio=1.0,
            max_pruning_ratio=1.0,
            iterative_steps=_STEPS,
            ignored_layers=last,
        )
        dense, left, found = flops_of(cell.dense, cell.example), sorted(cell.budgets), {}
        for step in range(_STEPS):
            pruner.step()
            flops = flops_of(model, cell.example)
            while left and flops <= left[-1] * dense:
                found[left.pop()] = Cut(copy.deepcopy(model), notes={"steps": step + 1})
            if not left:
                break
        return found

    return copy.deepcopy(cell.once("torch-pruning", walk)[cell.share])


def torch_pruning_refitted(cell: Cell, *, teacher: bool = False) -> Cut:
    """Keep the units of Torch-Pruning's L2 norms, refitted as ours are; with `teacher`, the dense model teaches."""
    found = torch_pruning(cell)
    graph = sk.trace_units(cell.dense.eval(), cell.example)
    mask = mask_of(graph, cell.dense, found.model)
    small = sk.compact(cell.dense, graph, mask)
    sk.reconstruct(cell.dense, small, graph, mask, cell.once("batches", cell.scoring))
    return replace(found, reconstructed=small, teacher=teacher, notes={**found.notes, "widths": mask.counts()})


ARMS: dict[str, Callable[[Cell], Cut]] = {
    "ours": partial(ours, teacher=True),
    "ours, no teacher": ours,
    "torch-pruning: L2": torch_pruning,
    "torch-pruning: L2, our refit": torch_pruning_refitted,
    "torch-pruning: L2, our refit and teacher": partial(torch_pruning_refitted, teacher=True),
    "scratch, uniform": partial(scratch, uniform=True),
    "scratch, our widths": scratch,
}


KEY = ("task", "arm", "budget", "seed")


def _measure(options: argparse.Namespace) -> None:
    done = [tuple(row[name] for name in KEY) for row in read(options.out)]
    for task_name, seed in product(options.task, range(options.seeds)):
        task = TASKS[task_name]
        data = load(task, options.data_dir)
        folder = options.out.with_suffix("") / f"{task_name}-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = task.make().to(memory_format=torch.channels_last)  # which one core trains faster
        cell = Cell(task, data, model, 1.0, seed, folder, tuple(options.budgets))
        pretraining = train(model, cell, "dense", task.pretrain, PRETRAIN_RATE)
        model.eval()
        for share, arm in [(1.0, "dense"), *product(options.budgets, options.arms)]:
            key = (task_name, arm, share, seed)
            if key in done:
                continue
            if arm == "dense":
                found = {"share": 1.0, "training_flops": pretraining, "flops": flops_of(model, cell.example)}
                found["finetuned"] = accuracy(model, Images(*data["test"]))
            else:
                place = folder / f"{arm.replace(': ', '-').replace(', ', '-').replace(' ', '-')}-{share:g}"
                place.mkdir(exist_ok=True)
                found = _one(replace(cell, share=share, folder=place), arm, pretraining)
            row = {**dict(zip(KEY, key)), **found, "torch": torch.__version__, "machine": platform.machine()}
            add(options.out, row)


def _one(cell: Cell, arm: str, pretraining: float) -> dict[str, Any]:
    cut = ARMS[arm](cell)
    test = Images(*cell.data["test"])
    small, task = cut.model, cell.task
    dense_flops, flops = flops_of(cell.dense, cell.example), flops_of(small, cell.example)
    found: dict[str, Any] = {"flops": flops, "share": flops / dense_flops, **cut.notes}
    if cut.scratch:
        spent = train(small, cell, "scratch", task.pretrain + task.finetune, PRETRAIN_RATE)
        return found | {"training_flops": spent, "finetuned": accuracy(small, test)}
    found["as_cut"] = accuracy(small, test)
    start = copy.deepcopy(small)
    sk.recalibrate_batchnorm(start, cell.scoring())
    found["recalibrated"] = accuracy(start, test)
    if cut.reconstructed is not None:
        start = cut.reconstructed
        sk.recalibrate_batchnorm(start, cell.scoring())
        found["compensated"] = accuracy(start, test)
    spent = train(start, cell, "finetuned", task.finetune, RATE, teacher=cell.dense if cut.teacher else None)
    if cut.teacher:  # forward passes of the teacher
        spent += dense_flops * len(cell.data["train"][1]) * task.finetune
    return found | {"training_flops": pretraining + spent, "finetuned": accuracy(start, test)}


def _rows(lines: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """Yield the rows of the table, by descending budget, then by arm."""
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        cells.setdefault((line["task"], -line["budget"], line["arm"]), []).append(line)
    columns = {"as_cut": "as cut", "recalibrated": "recalibrated", "compensated": "reconstructed", "finetuned": "fine-tuned"}
    for (task, share, arm), values in sorted(cells.items()):
        accuracies = {said: spread([value[name] for value in values if name in value], 3) for name, said in columns.items()}
        got = statistics.mean(value["share"] for value in values)
        flops = statistics.mean(value["training_flops"] for value in values)
        row = {"task": task, "budget": f"{-share:g}", "arm": arm, "share": f"{got:.3f}"}
        yield row | accuracies | {"training FLOPs": f"{flops:.2e}"}


def main() -> None:
    options = options_of(
        __doc__, choices={"task": TASKS, "arms": ARMS}, out=Path("prune.jsonl"), task=["resnet20-cifar10", "vgg11-cifar100"],
        budgets=[0.5, 0.25, 0.12], arms=list(ARMS), seeds=3, table=False,
        data_dir=Path(os.environ.get("SPARSEKIT_DATA", "data")),
    )  # fmt: skip
    warnings.simplefilter("ignore")
    if not options.table:
        _measure(options)
    show(_rows(read(options.out)), as_json=False)


if __name__ == "__main__":
    main()
