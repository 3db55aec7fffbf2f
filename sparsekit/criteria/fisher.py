"""Fisher: the mean square of the gradient of a unit's gate, over all layers that the unit ties together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from sparsekit.criteria.base import View
from sparsekit.criteria.batches import DataDriven, check_finite
from sparsekit.criteria.gate_gradients import Reduction, gate_moments
from sparsekit.graph.graph import UnitGraph


@dataclass(frozen=True)
class Fisher(DataDriven):
    """½·E[(∂L/∂gate)²]: the rise of the loss without the unit, near a minimum.

    One gate acts on everything that a group ties together, such as all blocks of a residual stage, so that the square is
    taken of the sum over all of them.

    Args:
        reduction: Whether the loss is the "mean" or the "sum" over the examples of a batch.

    Source: Theis et al., arXiv 1801.05787; Liu et al., Group Fisher Pruning for Practical Network Compression, ICML 2021.
    """

    reduction: Reduction = field(default="mean", kw_only=True)

    comparable: ClassVar[bool] = True

    def scores(self, graph: UnitGraph, view: View) -> Mapping[str, Tensor]:
        """Average the squares over the examples of all batches: float64, at least 0, in units of the loss."""
        moments = gate_moments(self, self._model(view, graph), graph, reduction=self.reduction)
        return {name: check_finite(name, 0.5 * each.square, "Fisher") for name, each in moments.items()}
