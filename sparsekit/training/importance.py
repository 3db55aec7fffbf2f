"""ImportanceLearner: learns which units stay, beside the weights, on a narrow narrow_model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparsekit.allocation.choose import choose
from sparsekit.errors import InvalidValueError
from sparsekit.training.narrow_model import HasState
from sparsekit.training.unit_vectors import UnitVectors, standardise

__all__ = ["ImportanceLearner", "ImportanceRegularizer"]

Target = Literal["standardised", "absolute"]
Reduction = Literal["sum", "mean"]


@dataclass(frozen=True, kw_only=True)
class ImportanceRegularizer:
    """The regulariser that pulls importance to a target which follows the weights, λ‖Q − σ(|θ|_J)‖².

    Args:
        strength: λ in the paper.
        target: "standardised": sigmoid of the absolute sums after each group's mean and deviation are removed;
            "absolute": sigmoid of the absolute sums, as in the paper (close to 1 for every unit of a wide network).
        reduction: "sum" over the units of a group, or their "mean".

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), importance regularisation term; the standardised target is ours.
    """

    strength: float = 1.0
    target: Target = "standardised"
    reduction: Reduction = "sum"

    def __post_init__(self) -> None:
        if not 0.0 <= self.strength < float("inf"):
            raise InvalidValueError(f"strength must be a finite number >= 0, got {self.strength}")
        if self.target not in ("standardised", "absolute"):
            raise InvalidValueError(f"target must be 'standardised' or 'absolute', got {self.target!r}")
        if self.reduction not in ("sum", "mean"):
            raise InvalidValueError(f"reduction must be 'sum' or 'mean', got {self.reduction!r}")

    def targets(self, magnitudes: Tensor, sizes: Sequence[int]) -> Tensor:
        """The target of every unit, a constant for the gradient.

        Args:
            magnitudes: float (J,), Σ |θ| of each unit, groups one after the other.
            sizes: Units of each group.

        Returns:
            float (J,) in [0, 1].
        """
        if self.target == "standardised":
            magnitudes = standardise(magnitudes, _group_of(sizes).to(magnitudes.device))
        return torch.sigmoid(magnitudes)

    def weights(self, sizes: Sequence[int]) -> Tensor:
        """λ, or λ divided by the size of the unit's group: float (J,)."""
        if self.reduction == "sum":
            return torch.full((sum(sizes),), self.strength)
        counts = torch.tensor(sizes)
        return self.strength / counts.to(torch.get_default_dtype()).repeat_interleave(counts)


def _group_of(sizes: Sequence[int]) -> Tensor:
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


class ImportanceLearner:
    """Importance of all units of a narrow_model, updated after each backward pass.

    Args:
        fused: The units of the narrow_model.
        importance: float (J,), the start; copied.
        lr: Learning rate of the importance.
        term: The regulariser.
    """

    def __init__(self, fused: UnitVectors, importance: Tensor, *, lr: float, term: ImportanceRegularizer) -> None:
        if importance.shape != (fused.total,):
            raise InvalidValueError(f"importance must have shape ({fused.total},), got {tuple(importance.shape)}")
        self.fused = fused
        self.importance = importance.detach().clone()
        self.lr = lr
        self.term = term
        self._pull = 2.0 * term.weights(fused.sizes.tolist()).to(self.importance)

    def targets(self) -> Tensor:
        """The targets of the regulariser at the present weights: float (J,)."""
        magnitudes = self.fused.magnitudes()
        if self.term.target == "standardised":
            magnitudes = standardise(magnitudes, self.fused.group_of, self.fused.sizes)
        return torch.sigmoid(magnitudes)

    def update(self, gradients: Mapping[Tensor, Tensor] | None = None) -> None:
        """One gradient step on the importance; call after the backward pass and before the weights are updated.

        Units that are not kept get only the regulariser, which re-admits them in time.

        Args:
            gradients: Leaf → gradient; None reads `.grad` of the leaves.
        """
        fused = self.fused
        gradient = (self.importance - self.targets()).mul_(self._pull)
        gradient.index_add_(0, fused.slot_units, fused.gate_gradient(gradients))
        self.importance.sub_(gradient, alpha=self.lr)

    def explore(self, gradient: Tensor, scale: float) -> None:
        """One step on the gate gradients of units that are not kept.

        Args:
            gradient: float (J,), of a `GateProbe`; what it says of kept units is not used.
            scale: How many steps the probe stands for.
        """
        dropped = self.fused.dropped_units
        self.importance.index_add_(0, dropped, gradient[dropped].to(self.importance), alpha=-self.lr * scale)

    def follow(self, optimizers: Sequence[HasState] = ()) -> bool:
        """Remask the narrow_model if another set of units is now the most important.

        Args:
            optimizers: Optimisers over the narrow_model's leaves.

        Returns:
            Whether the mask changed.

        Raises:
            InvalidValueError: the importance is NaN.
        """
        fused = self.fused
        if fused.stands(self.importance):
            return False
        if not bool(torch.isfinite(self.importance).all()):
            raise InvalidValueError("the importance became NaN or infinite; lower the learning rate of weights or importance")
        present = fused.narrow_model.mask
        mask = choose(fused.narrow_model.graph, fused.split(self.importance), present.counts())
        if mask == present:
            return False
        fused.remask(mask, optimizers)
        return True
