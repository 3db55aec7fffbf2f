"""GeometricMedian: units near the middle of their group can be replaced by the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsekit.criteria.base import Need, View
from sparsekit.criteria.magnitudes import own_slices
from sparsekit.errors import MissingImportanceError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import UnitGroup
from sparsekit.graph.index import wide
from sparsekit.graph.state import StateDict

__all__ = ["GeometricMedian"]


@dataclass(frozen=True)
class GeometricMedian:
    """The sum of the distances of a unit's filter to the filters of all other units of its group.

    Filters are the matrices that make the units, one after the other where a group has several; biases and norms are left
    out. A group without matrices uses the vectors that it has.
    """

    learned: ClassVar[bool] = False
    comparable: ClassVar[bool] = False
    needs: ClassVar[frozenset[Need]] = frozenset({"weights"})

    def scores(self, graph: UnitGraph, view: View) -> Mapping[str, Tensor]:
        """Sum up distances.

        Args:
            graph: The groups.
            view: Needs `weights`, the dense state.

        Returns:
            Group name → float (units,), at least 0; 0 in a group of one unit.

        Raises:
            MissingImportanceError: `view.weights` is None.

        Source: He et al., Filter Pruning via Geometric Median, CVPR 2019.
        """
        if view.weights is None:
            raise MissingImportanceError("GeometricMedian needs the weights; pass View(weights=model.state_dict())")
        found = {}
        for name, group in graph.groups.items():
            # The square of a distance over several matrices is the sum over each: no long vectors are joined.
            square = torch.zeros(group.size, group.size)
            for filters in _filters(group, view.weights):
                # Not by inner products, which lose all digits between near filters.
                part = torch.cdist(filters, filters, compute_mode="donot_use_mm_for_euclid_dist").square()
                square = square.to(part) + part
            found[name] = square.sqrt().sum(1)
        return found


def _filters(group: UnitGroup, weights: StateDict) -> list[Tensor]:
    """float (units, numbers) of each matrix that makes the units."""
    own = [group.slices[i] for i in own_slices(group, weights)]
    chosen = [piece for piece in own if weights[piece.name].dim() > 1] or own
    found = []
    for piece in chosen:
        entry = wide(weights[piece.name].detach()).movedim(piece.dim, 0)
        found.append(entry[piece.index.to(entry.device)].reshape(group.size, -1))
    return found
