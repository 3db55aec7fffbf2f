"""Rule: how a learnable mask learns importance and changes its mask. One instance serves one mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsekit.criteria.base import Criterion
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.measure.budget import Budget
from sparsekit.training.execution import Execution
from sparsekit.training.optimizer_hooks import OptimizerSet

__all__ = ["Host", "Learning", "Rule", "refilled", "split_units"]


class Host(Protocol):
    """What a rule may use of the learnable mask that it serves."""

    graph: UnitGraph
    criterion: Criterion
    generator: torch.Generator | None
    optimizers: OptimizerSet
    training: bool
    joined: bool
    """Whether every parameter must take part in every step, as DistributedDataParallel demands."""
    scores: torch.nn.Parameter

    @property
    def execution(self) -> Execution:
        """What runs the model."""
        ...

    budget: Budget | None

    @property
    def target(self) -> object:
        """What the counts follow from: compares unequal when they change."""
        ...

    def within_budget(self, worth: Tensor, limits: Mapping[str, tuple[float, float]]) -> Mapping[str, int]:
        """The counts within the budget at which the groups lose least, by worth (J,) and the (least, largest) share of each."""
        ...

    def set_widths(self, widths: Mapping[str, int]) -> None:
        """Change the widths within the budget."""
        ...

    def counts(self) -> Mapping[str, int]:
        """Group name → units to keep, as the allocation has it now."""
        ...

    def pass_flops(self, mask: UnitMask) -> float:
        """Work of a forward pass under `mask`, in any unit that is the same for all masks."""
        ...

    def change(self, mask: UnitMask) -> None:
        """Change the mask: weights and optimiser state follow."""
        ...


class Rule(Protocol):
    """The rule of one learnable mask, with what it remembers."""

    @property
    def settled(self) -> bool:
        """Whether the mask will not change again by itself."""
        ...

    @property
    def explored(self) -> float:
        """Work of exploration so far as a share of the training passes' own work."""
        ...

    def sync(self, host: Host) -> None:
        """Change the mask where it is due."""
        ...

    def resample(self, host: Host) -> None:
        """Ask the criterion again and change the mask to what it says."""
        ...

    def call(self, host: Host, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the sparse model."""
        ...

    def learn(self, host: Host, gradients: Mapping[Tensor, Tensor] | None) -> None:
        """Step importance by the gradients of the weights, leaf → gradient or their `.grad`, if the rule steps it itself."""
        ...

    def penalty(self, host: Host) -> Tensor:
        """What the rule adds to the loss: a scalar."""
        ...

    def before_step(self, host: Host, optimizer: Optimizer) -> None:
        """Before `optimizer` changes parameters of the mask."""
        ...

    def after_step(self, host: Host, optimizer: Optimizer) -> None:
        """After `optimizer` changed parameters of the mask."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What it remembers, to be saved."""
        ...

    def load(self, host: Host, state: dict[str, Tensor]) -> None:
        """Go on from what `state` returned, or from nothing if that is empty."""
        ...

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Move or cast every tensor that it remembers."""
        ...


@runtime_checkable
class Learning(Protocol):
    """The settings of a rule: what `LearnableMask(learning=…)` takes."""

    def rule(self, host: Host) -> Rule:
        """Return a new rule for `host`."""
        ...


def split_units(graph: UnitGraph, fused: Tensor) -> dict[str, Tensor]:
    """Views of a vector over all units, float (J,), by group: group name → (units,)."""
    parts = fused.split([group.size for group in graph.groups.values()])
    return dict(zip(graph.groups, parts, strict=True))


def refilled(graph: UnitGraph, mask: UnitMask, scores: Tensor, counts: Mapping[str, int]) -> UnitMask:
    """The mask with as many units as `counts` says: the least worth go, or the most worth come; nobody else moves.

    Args:
        graph: The units.
        mask: What is kept now.
        scores: float (J,), what each unit is worth; ties go to the lower index.
        counts: Group name → units to keep.
    """
    keep = dict(mask)
    for name, score in split_units(graph, scores.cpu()).items():
        rank = torch.where(mask[name], score + (score.max() - score.min() + 1.0), score)
        chosen = rank.argsort(descending=True, stable=True)[: counts[name]]
        keep[name] = torch.zeros_like(mask[name]).index_fill_(0, chosen, True)
    return UnitMask(keep)
