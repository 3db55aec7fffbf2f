"""Random: units drawn uniformly without replacement stay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsekit.criteria.base import PatternView
from sparsekit.errors import MissingImportanceError
from sparsekit.graph.graph import UnitGroup

__all__ = ["Random"]


@dataclass(frozen=True)
class Random:
    """Keep a uniformly random subset, fresh each time."""

    def keep(self, group: UnitGroup, count: int, view: PatternView) -> Tensor:
        """Draw `count` units.

        Args:
            group: The units to choose from.
            count: How many to keep, in [1, group.size].
            view: Needs `generator`.

        Returns:
            bool (units,), exactly `count` of them True.

        Raises:
            MissingImportanceError: `view.generator` is None.

        Source: Caldas et al., Federated Dropout, arXiv 1812.07210.
        """
        if view.generator is None:
            raise MissingImportanceError("Random needs a generator; pass PatternView(generator=torch.Generator())")
        keep = torch.zeros(group.size, dtype=torch.bool)
        keep[torch.randperm(group.size, generator=view.generator)[:count]] = True
        return keep
