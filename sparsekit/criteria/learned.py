"""Learned: the importance of a unit is what it is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparsekit.criteria.base import View
from sparsekit.errors import MissingImportanceError
from sparsekit.graph.graph import UnitGraph


@dataclass(frozen=True)
class Learned:
    """The rule of FedLPS: keep the units at or above the (1 − ratio)-quantile of their group's importance.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), importance-derived sparse pattern.
    """

    learned: ClassVar[bool] = True

    def scores(self, graph: UnitGraph, view: View) -> Mapping[str, Tensor]:
        """Return the importance itself: views, not copies."""
        importance = {} if view.importance is None else view.importance
        for name in graph.groups:
            if name not in importance:
                raise MissingImportanceError(
                    f"Learned needs importance for group {name!r}; pass View(importance={{group: scores}})"
                )
        return importance
