"""GeometricMedian: units near the middle of their group can be replaced by the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsekit.criteria.base import View
from sparsekit.criteria.magnitudes import own_slices
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import wide


@dataclass(frozen=True)
class GeometricMedian:
    """The sum of the distances of a unit's filter to the filters of all other units of its group.

    Filters are the matrices that make the units, one after the other where a group has several; biases and norms are left
    out. A group without matrices uses the vectors that it has.

    Source: He et al., Filter Pruning via Geometric Median, CVPR 2019.
    """

    def scores(self, graph: UnitGraph, view: View) -> Mapping[str, Tensor]:
        """Sum up distances; 0 in a group of one unit."""
        weights, found = view.weights_for(self), {}
        for name, group in graph.groups.items():
            own = [group.slices[i] for i in own_slices(group, weights)]
            # The square of a distance over several matrices is the sum over each: no long vectors are joined.
            square = torch.zeros(group.size, group.size)
            for piece in [piece for piece in own if weights[piece.name].dim() > 1] or own:
                entry = wide(weights[piece.name].detach()).movedim(piece.dim, 0)
                filters = entry[piece.index.to(entry.device)].reshape(group.size, -1)
                # Not by inner products, which lose all digits between near filters.
                part = torch.cdist(filters, filters, compute_mode="donot_use_mm_for_euclid_dist").square()
                square = square.to(part) + part
            found[name] = square.sqrt().sum(1)
        return found
