"""Lamp: the share of a unit in what is at least as large in its group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from sparsekit.criteria.base import View
from sparsekit.criteria.magnitude import Magnitude
from sparsekit.criteria.normalised import Normalised
from sparsekit.graph.graph import UnitGraph


@dataclass(frozen=True)
class Lamp:
    """w_j² / Σ w_k² over the units k of the group with w_k² ≥ w_j², where w_j² is the sum of squares of a unit.

    The largest unit of every group has score 1, so that a global ranking never empties a layer. Of equal units the higher
    index counts as the smaller one.

    Args:
        coupled: Whether the entries that read a unit count too.

    Source: Lee et al., Layer-adaptive Sparsity for the Magnitude-based Pruning, ICLR 2021, there for single weights.
    """

    coupled: bool = field(default=False, kw_only=True)

    comparable: ClassVar[bool] = True

    def scores(self, graph: UnitGraph, view: View) -> Mapping[str, Tensor]:
        """Divide each unit's squares by those of the units that are at least as large."""
        return Normalised(Magnitude(order=2, coupled=self.coupled), by="share_of_remaining").scores(graph, view)
