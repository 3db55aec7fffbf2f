"""The arms of Torch-Pruning in `benchmarks/prune.py`, driven as that library's own reproduction script drives it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from prune_cells import Cell, Cut, flops_of, train
from torch import Tensor, nn

__all__ = ["RIVALS"]

_STEPS = 400


def _head(model: nn.Module) -> nn.Module:
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1]


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
            ignored_layers=[_head(model)],
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
            if gradients and step % 10 != 9:
                _keep_gradients(model)
        return found

    def arm(cell: Cell) -> Cut:
        return copy.deepcopy(cell.once(name, lambda: walk(cell))[cell.share])

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


RIVALS: dict[str, Callable[[Cell], Cut]] = {
    "torch-pruning: L2": _torch_pruning("magnitude", is_global=False),
    "torch-pruning: L2, global": _torch_pruning("magnitude", is_global=True),
    "torch-pruning: L2, isomorphic": _torch_pruning("magnitude", is_global=True, isomorphic=True),
    "torch-pruning: taylor": _torch_pruning("taylor", is_global=True, gradients=True),
    "torch-pruning: group-sl": _torch_pruning("group", is_global=True),
}
