"""BatchNormScale: the scale |γ| that a batch norm gives to a channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsekit.criteria.base import Criterion, View, score_units
from sparsekit.errors import MissingImportanceError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import UnitGroup, UnitSlice
from sparsekit.graph.index import wide


def _norm_scales(group: UnitGroup, graph: UnitGraph) -> list[UnitSlice]:
    """The scales of batch norms that act on the units of a group: vectors `weight` beside a `running_var`."""
    return [
        piece
        for piece in group.slices
        if piece.name.rpartition(".")[2] == "weight"
        and len(graph.shapes[piece.name]) == 1
        and f"{piece.name.removesuffix('weight')}running_var" in graph.shapes
    ]


@dataclass(frozen=True)
class BatchNormScale:
    """The mean of |γ| over the batch norms of a unit. It tells most after training with an L1 penalty on the scales.

    Args:
        otherwise: Scores groups without a batch norm, such as the hidden layers of a classifier; None raises for them.
            Its scores should be on the scale of the others', as those of `Normalised(Magnitude())` are.

    Source: Liu et al., Learning Efficient Convolutional Networks through Network Slimming, ICCV 2017.
    """

    otherwise: Criterion | None = None

    comparable: ClassVar[bool] = True

    def scores(self, graph: UnitGraph, view: View) -> Mapping[str, Tensor]:
        """Read the scales."""
        weights = view.weights_for(self)
        scales = {name: _norm_scales(group, graph) for name, group in graph.groups.items()}
        without = [name for name, found in scales.items() if not found]
        other: Mapping[str, Tensor] = {}
        if without:
            if self.otherwise is None:
                raise MissingImportanceError(
                    f"no batch norm acts on the units of {', '.join(map(repr, without[:5]))}"
                    f"{' and others' if len(without) > 5 else ''}; pass otherwise=Normalised(Magnitude()),"
                    " or leave these groups out with sparsekit.graph.edit.without"
                )
            other = score_units(self.otherwise, graph, view)
        found = {}
        for name, pieces in scales.items():
            parts = []
            for piece in pieces:
                scale = wide(weights[piece.name].detach()).abs()
                parts.append(scale[piece.index.to(scale.device)].mean(1))
            found[name] = torch.stack(parts).mean(0) if parts else other[name]
        return found
