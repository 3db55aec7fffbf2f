"""Rule: how a learnable mask learns importance and changes; Learning: the settings of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit.criteria.base import Criterion
from sparsekit.errors import ForeignMaskError, InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.measure.budget import Budget
from sparsekit.training.narrow_model import NarrowModel
from sparsekit.training.optimizers import OptimizerSet
from sparsekit.training.regularizer import ImportanceRegularizer
from sparsekit.training.unit_vectors import UnitVectors, split_units
from sparsekit.training.widening import WidePasses
from sparsekit.training.widths import Widths


class MaskedModule(nn.Module, ABC):
    """What a rule uses of a learnable mask, and what both have of importance and widths."""

    graph: UnitGraph
    model: nn.Module
    """The narrow module."""
    criterion: Criterion
    generator: torch.Generator | None
    scores: Tensor
    """Importance of every unit, float (J,), in the order of the graph's groups."""
    widths: Widths
    """How many units of each group stay."""
    optimizers: OptimizerSet
    """The optimizers that follow the mask, and other objects with state for the leaves."""
    distributed: bool
    """Whether every parameter must take part in every step, as DistributedDataParallel demands."""
    narrow_model: NarrowModel
    wide_passes: WidePasses

    @property
    @abstractmethod
    def vectors(self) -> UnitVectors:
        """Vectors over the units."""

    @property
    def ratio(self) -> float:
        """Share of units kept in each group, in (0, 1]; with a budget, of all units.

        Assign to change it; the next call changes the mask.

        Raises:
            InvalidValueError: assigned where a budget says what is kept.
        """
        return self.widths.ratio

    @ratio.setter
    def ratio(self, ratio: float) -> None:
        self.widths.ratio = ratio

    @property
    def budget(self) -> Budget | None:
        """What the sparse model may cost; None if the ratio says what is kept."""
        return self.widths.budget

    def importance(self) -> dict[str, Tensor]:
        """Group name → float (units,): copies of the present importance."""
        return {name: part.clone() for name, part in split_units(self.graph, self.scores).items()}

    def importance_vector(self) -> Tensor:
        """Return the present importance of all units, float (J,), in the order of the graph's groups; a copy."""
        return self.scores.clone()

    def load_importance(self, importance: Mapping[str, Tensor]) -> None:
        """Set the importance of some or all groups.

        Raises:
            ForeignMaskError: an unknown group or another number of units.
            InvalidValueError: a value is NaN or infinite.
        """
        parts = split_units(self.graph, self.scores)
        for name, values in importance.items():
            if name not in parts or values.shape != parts[name].shape:
                expected = {group.name: group.size for group in self.graph.groups.values()}
                raise ForeignMaskError(f"importance of {name!r} has shape {tuple(values.shape)}; groups and sizes: {expected}")
            if not bool(torch.isfinite(values).all()):
                raise InvalidValueError(f"importance of {name!r} must be finite")
        with torch.no_grad():
            for name, values in importance.items():
                parts[name].copy_(values)

    @abstractmethod
    def change_mask(self, mask: UnitMask) -> None:
        """Change the mask; weights and optimizer state follow.

        Raises:
            InvalidValueError: an optimizer is in the middle of a step, or keeps a history that cannot follow.
        """


class Rule:
    """The rule of one learnable mask, with its memory. The base learns nothing, for a mask that was given and stays."""

    @property
    def converged(self) -> bool:
        """Whether the mask will not change again by itself."""
        return True

    @property
    def exploration_cost(self) -> float:
        """Work of exploration so far, as a share of the work of all training passes."""
        return 0.0

    def apply_pending(self, masked: MaskedModule) -> None:
        """Change the mask if it is due."""

    def recompute_mask(self, masked: MaskedModule) -> None:
        """Ask the criterion again and change the mask to what it says."""

    def call(self, masked: MaskedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change the mask if it is due, and run the sparse model."""
        return masked.narrow_model.run(args, kwargs)

    def update_importance(
        self, masked: MaskedModule, gradients: Mapping[Tensor, Tensor] | None, scale: Tensor | None = None
    ) -> None:
        """End a step: learn from the gradients of the weights.

        Args:
            masked: The learnable mask.
            gradients: Leaf → gradient; None takes `.grad` of the leaves.
            scale: The factor of a GradScaler that they still contain.
        """

    def state(self) -> dict[str, Tensor]:
        """Return its memory, to be saved."""
        return {}

    def load(self, masked: MaskedModule, state: dict[str, Tensor]) -> None:
        """Continue from what `state` returned, or from nothing if that is empty."""

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Move or cast every tensor of its memory."""


class Learning(ABC):
    """The settings of a rule: what `LearnableMask(learning=…)` takes."""

    regularizer: ImportanceRegularizer = ImportanceRegularizer()

    def targets(self, graph: UnitGraph, magnitudes: Tensor) -> Tensor:
        """Return the initial importance, float (J,), of units with these magnitudes."""
        return self.regularizer.targets(magnitudes, [group.size for group in graph.groups.values()])

    @abstractmethod
    def rule(self, masked: MaskedModule) -> Rule:
        """Return a new rule for `masked`."""


def resized_mask(graph: UnitGraph, mask: UnitMask, scores: Tensor, counts: Mapping[str, int]) -> UnitMask:
    """Drop the least important units of a mask, or add the most important others, until `counts` is met.

    `scores`, float (J,), is the importance of each unit; ties go to the lower index.
    """
    keep = dict(mask)
    for name, score in split_units(graph, scores.cpu()).items():
        rank = torch.where(mask[name], score + (score.max() - score.min() + 1.0), score)
        chosen = rank.argsort(descending=True, stable=True)[: counts[name]]
        keep[name] = torch.zeros_like(mask[name]).index_fill_(0, chosen, True)
    return UnitMask(keep)
