"""TopImportance: the units of largest importance stay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsekit.criteria.base import PatternView, keep_largest
from sparsekit.errors import InvalidValueError, MissingImportanceError
from sparsekit.graph.graph import UnitGroup

__all__ = ["TopImportance"]


@dataclass(frozen=True)
class TopImportance:
    """The rule of FedLPS: keep the units at or above the (1 − ratio)-quantile of their group's importance."""

    def keep(self, group: UnitGroup, count: int, view: PatternView) -> Tensor:
        """Keep the `count` units of largest importance.

        Args:
            group: The units to choose from.
            count: How many to keep, in [1, group.size].
            view: Needs `importance[group.name]`, float (units,).

        Returns:
            bool (units,), exactly `count` of them True; ties go to the lower index.

        Raises:
            MissingImportanceError: `view.importance` is None or lacks the group.
            InvalidValueError: an importance is NaN.

        Source: Xue et al., ICDE 2025 (arXiv 2412.07216), importance-derived sparse pattern.
        """
        if view.importance is None or group.name not in view.importance:
            raise MissingImportanceError(
                f"TopImportance needs importance for group {group.name!r}; pass PatternView(importance={{group: scores}})"
            )
        scores = view.importance[group.name]
        if bool(torch.isnan(scores).any()):
            raise InvalidValueError(f"importance of group {group.name!r} holds NaN; lower the learning rate of the importance")
        return keep_largest(scores, count)
