"""Magnitude: units with large weights are worth most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparsekit.criteria.base import Need, View
from sparsekit.criteria.magnitudes import unit_magnitudes
from sparsekit.errors import MissingImportanceError
from sparsekit.graph.graph import UnitGraph

__all__ = ["Magnitude"]


@dataclass(frozen=True)
class Magnitude:
    """The sum of absolute values of a unit's own parameters: filter rows, bias, norm scale."""

    learned: ClassVar[bool] = False
    needs: ClassVar[frozenset[Need]] = frozenset({"weights"})

    def scores(self, graph: UnitGraph, view: View) -> Mapping[str, Tensor]:
        """Sum up each unit's absolute weights.

        Args:
            graph: The groups.
            view: Needs `weights`, the dense state.

        Returns:
            Group name → float (units,) in the dtype of the weights.

        Raises:
            MissingImportanceError: `view.weights` is None.

        Source: Li et al., Pruning Filters for Efficient ConvNets, ICLR 2017.
        """
        if view.weights is None:
            raise MissingImportanceError("Magnitude needs the weights; pass View(weights=model.state_dict())")
        return {name: unit_magnitudes(group, view.weights) for name, group in graph.groups.items()}
