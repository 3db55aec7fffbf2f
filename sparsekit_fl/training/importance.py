"""ImportanceLearner: learns which units stay, beside the weights, while a client trains a narrow model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsekit.allocation.choose import choose
from sparsekit.errors import InvalidValueError
from sparsekit.surgery.optimizer_state import HasState
from sparsekit.training.regularizer import ImportanceRegularizer, standardise
from sparsekit.training.unit_vectors import UnitVectors
from sparsekit_fl.training.loop import Batch

__all__ = ["ImportanceLearner"]


class ImportanceLearner:
    """Importance of all units of a narrow model, updated after each backward pass.

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

    def outputs(self, batch: Batch, optimizers: Sequence[HasState]) -> Any:
        """Run the narrow model on a batch."""
        del optimizers  # the mask follows after the step
        return self.fused.narrow_model.module(*batch.inputs)

    def targets(self) -> Tensor:
        """Return the targets of the regulariser at the present weights: float (J,)."""
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
        gradient.index_add_(0, fused.slot_units, fused.gate_gradient(gradients).to(gradient))
        self.importance.sub_(gradient, alpha=self.lr)

    def explore(self, gradient: Tensor, scale: float) -> None:
        """One step on the gate gradients of units that are not kept.

        Args:
            gradient: float (J,), of a `GateProbe`; what it says of kept units is not used.
            scale: Number of steps that the probe stands for.
        """
        dropped = self.fused.dropped_units
        self.importance.index_add_(0, dropped, gradient[dropped].to(self.importance), alpha=-self.lr * scale)

    def follow(self, optimizers: Sequence[HasState] = ()) -> bool:
        """Remask the narrow model if another set of units is now the most important.

        Args:
            optimizers: Optimisers over the leaves of the narrow model.

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
