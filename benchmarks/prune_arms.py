"""The arms of `benchmarks/prune.py`: ours, Torch-Pruning as its own script drives it, narrow networks from scratch."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import mask_of
from prune_cells import Cell, Cut, flops_of, train
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.criteria import Magnitude
from sparsekit.finetuning import GroupSL


def _cut(cell: Cell, **options: Any) -> Any:
    return sk.prune(cell.dense, (cell.example,), budget={"flops": f"{100 * cell.share:g}%"}, **options)


def _compensated(cell: Cell, dense: nn.Module, pruned: Any) -> nn.Module:
    """A copy of what was cut out of `dense`, its consumers refitted."""
    small = copy.deepcopy(pruned.model)
    sk.reconstruct(dense, small, pruned.graph, pruned.mask, cell.once("batches", cell.scoring))
    return small


def _default(cell: Cell) -> tuple[Any, nn.Module]:
    """What `sk.prune` does by default with batches, Fisher by cost and consumers refitted, in parts so that each is scored."""

    def find() -> tuple[Any, nn.Module]:
        batches = cell.once("batches", cell.scoring)
        pruned = _cut(cell, batches=batches, loss=F.cross_entropy, reconstruct=False, multiple_of=1, criterion="fisher")
        return pruned, _compensated(cell, cell.dense, pruned)

    pruned, small = cell.once(f"default at {cell.share:g}", find)
    return pruned, copy.deepcopy(small)


def ours(cell: Cell, *, teacher: bool = False) -> Cut:
    """The default with batches; the dense model may teach, while rivals are fine-tuned on labels alone."""
    pruned, small = _default(cell)
    return Cut(copy.deepcopy(pruned.model), small, teacher=teacher, notes={"widths": pruned.mask.counts()})


def ours_group_sl(cell: Cell, *, repaired: bool = False) -> Cut:
    """Sparse training by our GroupSL, then magnitudes by cost; repaired against that network, the dense model teaches."""

    def sparse() -> tuple[nn.Module, float]:
        dense, schedule = copy.deepcopy(cell.dense), cell.schedule
        graph = sk.trace_units(dense.eval(), cell.example)
        shared, rate = cell.of_all_budgets(), schedule.rates[2]
        return dense, train(dense, shared, "sparse", schedule.sparse, rate, regularizer=GroupSL(graph, 5e-4))

    dense, spent = cell.once("sparse", sparse)
    pruned = _cut(replace(cell, dense=dense.eval()), criterion=Magnitude(order=2, coupled=True))
    small = _compensated(cell, dense, pruned) if repaired else None
    return Cut(pruned.model, small, teacher=repaired, sparse_flops=spent, notes={"widths": pruned.mask.counts()})


def _reset(model: nn.Module, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return model


def scratch_uniform(cell: Cell) -> Cut:
    """A uniformly narrow network from random weights."""
    pruned = _cut(cell, criterion="magnitude", allocation="uniform")
    return Cut(_reset(pruned.model, cell.seed), scratch=True, notes={"widths": pruned.mask.counts()})


def scratch_ours(cell: Cell) -> Cut:
    """Random weights in the widths that `ours` has found."""
    pruned, _ = _default(cell)
    small = _reset(copy.deepcopy(pruned.model), cell.seed)
    return Cut(small, scratch=True, notes={"widths": pruned.mask.counts()})


_STEPS = 400


def _torch_pruning(kind: str, *, is_global: bool, isomorphic: bool = False, gradients: bool = False) -> Callable[[Cell], Cut]:
    """Small steps until the FLOPs are met. All budgets of a dense model lie on one way, which is gone once."""
    name = f"torch-pruning {kind} {is_global} {isomorphic}"

    def maker(model: nn.Module, cell: Cell) -> Any:
        import torch_pruning as tp

        importances = {
            "magnitude": lambda: tp.importance.MagnitudeImportance(p=2),
            "taylor": lambda: tp.importance.TaylorImportance(),
            "group": lambda: tp.importance.GroupMagnitudeImportance(p=2, normalizer="max"),
        }
        make = tp.pruner.GroupNormPruner if kind == "group" else tp.pruner.BasePruner
        options: dict[str, Any] = {"reg": 5e-4} if kind == "group" else {}
        return make(
            model,
            cell.example,
            importance=importances[kind](),
            global_pruning=is_global,
            isomorphic=isomorphic,
            pruning_ratio=1.0,
            max_pruning_ratio=1.0,
            iterative_steps=_STEPS,
            ignored_layers=[module for module in model.modules() if isinstance(module, nn.Linear)][-1:],
            **options,
        )

    def walk(cell: Cell) -> dict[float, Cut]:
        model = copy.deepcopy(cell.dense).eval()
        spent = 0.0
        if kind == "group":
            pruner = maker(model, cell)
            pruner.update_regularizer()
            rate, shared = cell.schedule.rates[2], cell.of_all_budgets()
            spent = train(model, shared, name, cell.schedule.sparse, rate, regularizer=_Regularize(pruner))
            model.eval()
        pruner = maker(model, cell)
        dense, left, found = flops_of(cell.dense, cell.example), sorted(cell.budgets), {}
        for step in range(_STEPS):
            if gradients and step % 10 == 0:
                model.zero_grad()
                for x, y in cell.scoring():
                    F.cross_entropy(model(x), y).backward()
            pruner.step()
            flops = flops_of(model, cell.example)
            while left and flops <= left[-1] * dense:
                small = copy.deepcopy(model)
                small.zero_grad()
                found[left.pop()] = Cut(small, sparse_flops=spent, notes={"steps": step + 1})
            if not left:
                break
            for parameter in model.parameters() if gradients and step % 10 != 9 else ():
                if parameter.grad is None or parameter.grad.shape != parameter.shape:
                    parameter.grad = torch.zeros_like(parameter)
        return found

    def arm(cell: Cell) -> Cut:
        return copy.deepcopy(cell.once(name, lambda: walk(cell))[cell.share])

    return arm


def torch_pruning_refitted(cell: Cell, *, teacher: bool = False) -> Cut:
    """The units that its L2 norms keep, refitted as ours are; the dense model may teach."""
    found = ARMS["torch-pruning: L2"](cell)
    graph = sk.trace_units(cell.dense.eval(), cell.example)
    mask = mask_of(graph, cell.dense, found.model)
    small = sk.compact(cell.dense, graph, mask)
    sk.reconstruct(cell.dense, small, graph, mask, cell.once("batches", cell.scoring))
    return replace(found, compensated=small, teacher=teacher, notes={**found.notes, "widths": mask.counts()})


class _Regularize:
    """The library's regularizer in the place of ours."""

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
    "ours": partial(ours, teacher=True),
    "ours, no teacher": ours,
    "ours: group-sl": ours_group_sl,
    "ours: group-sl, repaired": partial(ours_group_sl, repaired=True),
    "torch-pruning: L2": _torch_pruning("magnitude", is_global=False),
    "torch-pruning: L2, our refit": torch_pruning_refitted,
    "torch-pruning: L2, our refit and teacher": partial(torch_pruning_refitted, teacher=True),
    "torch-pruning: L2, global": _torch_pruning("magnitude", is_global=True),
    "torch-pruning: L2, isomorphic": _torch_pruning("magnitude", is_global=True, isomorphic=True),
    "torch-pruning: taylor": _torch_pruning("taylor", is_global=True, gradients=True),
    "torch-pruning: group-sl": _torch_pruning("group", is_global=True),
    "scratch, uniform": scratch_uniform,
    "scratch, our widths": scratch_ours,
}
