"""The arms of `benchmarks/prune.py`: ours, Torch-Pruning as its own script drives it, narrow networks from scratch."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import mask_of
from prune_cells import Cell, Cut, flops_of
from torch import nn

import sparsekit as sk


def _cut(cell: Cell, **options: Any) -> Any:
    return sk.prune(cell.dense, (cell.example,), budget={"flops": f"{100 * cell.share:g}%"}, **options)


def _reconstructed(cell: Cell, dense: nn.Module, pruned: Any) -> nn.Module:
    small = copy.deepcopy(pruned.model)
    sk.reconstruct(dense, small, pruned.graph, pruned.mask, cell.once("batches", cell.scoring))
    return small


def _default(cell: Cell) -> tuple[Any, nn.Module]:
    """What `sk.prune` does by default with batches, Fisher by cost and consumers refitted, in parts so that each is scored."""

    def find() -> tuple[Any, nn.Module]:
        batches = cell.once("batches", cell.scoring)
        pruned = _cut(cell, batches=batches, loss=F.cross_entropy, reconstruct=False, multiple_of=1, criterion="fisher")
        return pruned, _reconstructed(cell, cell.dense, pruned)

    pruned, small = cell.once(f"default at {cell.share:g}", find)
    return pruned, copy.deepcopy(small)


def ours(cell: Cell, *, teacher: bool = False) -> Cut:
    """The default with batches; the dense model may teach, while rivals are fine-tuned on labels alone."""
    pruned, small = _default(cell)
    return Cut(copy.deepcopy(pruned.model), small, teacher=teacher, notes={"widths": pruned.mask.counts()})


def _reset(model: nn.Module, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return model


def scratch_uniform(cell: Cell) -> Cut:
    pruned = _cut(cell, criterion="magnitude", allocation="uniform")
    return Cut(_reset(pruned.model, cell.seed), scratch=True, notes={"widths": pruned.mask.counts()})


def scratch_ours(cell: Cell) -> Cut:
    pruned, _ = _default(cell)
    small = _reset(copy.deepcopy(pruned.model), cell.seed)
    return Cut(small, scratch=True, notes={"widths": pruned.mask.counts()})


_STEPS = 400


def torch_pruning(cell: Cell) -> Cut:
    """L2 norms in small steps until the FLOPs are met, as in its own script; one walk serves all budgets of a dense model."""

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
    """The units that its L2 norms keep, refitted as ours are; the dense model may teach."""
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
    "scratch, uniform": scratch_uniform,
    "scratch, our widths": scratch_ours,
}
