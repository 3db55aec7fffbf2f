"""Magnitude: the units with the largest weights stay."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparsekit.criteria.base import PatternView, keep_largest
from sparsekit.criteria.magnitudes import unit_magnitudes
from sparsekit.errors import MissingImportanceError
from sparsekit.graph.graph import UnitGroup

__all__ = ["Magnitude"]


@dataclass(frozen=True)
class Magnitude:
    """Keep the units whose own parameters (filter rows, bias, norm scale) have the largest sum of absolute values."""

    def keep(self, group: UnitGroup, count: int, view: PatternView) -> Tensor:
        """Keep the `count` units of largest magnitude.

        Args:
            group: The units to choose from.
            count: How many to keep, in [1, group.size].
            view: Needs `weights`, the dense state.

        Returns:
            bool (units,), exactly `count` of them True; ties go to the lower index.

        Raises:
            MissingImportanceError: `view.weights` is None.

        Source: Li et al., Pruning Filters for Efficient ConvNets, ICLR 2017.
        """
        if view.weights is None:
            raise MissingImportanceError("Magnitude needs the weights; pass PatternView(weights=model.state_dict())")
        return keep_largest(unit_magnitudes(group, view.weights), count)
