"""Lamp: the share of a unit in what is at least as large in its group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from sparsekit.criteria.base import Need, View
from sparsekit.criteria.magnitudes import all_slices, own_slices, unit_sums
from sparsekit.errors import MissingImportanceError
from sparsekit.graph.graph import UnitGraph

__all__ = ["Lamp"]


@dataclass(frozen=True)
class Lamp:
    """w_j² / Σ w_k² over the units k of the group with w_k² ≥ w_j², where w_j² is the sum of squares of a unit.

    The largest unit of every group has score 1, so that a global ranking never empties a layer.

    Args:
        coupled: Whether the entries that read a unit count too.
    """

    coupled: bool = field(default=False, kw_only=True)

    learned: ClassVar[bool] = False
    comparable: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({"weights"})

    def scores(self, graph: UnitGraph, view: View) -> Mapping[str, Tensor]:
        """Divide each unit's squares by those of the units that are at least as large.

        Args:
            graph: The groups.
            view: Needs `weights`, the dense state.

        Returns:
            Group name → float64 (units,), in [0, 1]. Of equal units the higher index counts as the smaller one.

        Raises:
            MissingImportanceError: `view.weights` is None.

        Source: Lee et al., Layer-adaptive Sparsity for the Magnitude-based Pruning, ICLR 2021, there for single weights.
        """
        if view.weights is None:
            raise MissingImportanceError("Lamp needs the weights; pass View(weights=model.state_dict())")
        chosen = all_slices if self.coupled else own_slices
        found = {}
        for name, group in graph.groups.items():
            squares = unit_sums(group, view.weights, chosen(group, view.weights), order=2).double()
            order = torch.sort(squares, descending=True, stable=True).indices
            above = torch.cumsum(squares[order], 0)
            found[name] = torch.empty_like(squares).index_copy_(0, order, squares[order] / above.clamp_min(1e-300))
        return found
