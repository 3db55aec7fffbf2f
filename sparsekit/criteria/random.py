"""Random: units drawn uniformly without replacement stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsekit.criteria.base import Need, View
from sparsekit.errors import MissingImportanceError
from sparsekit.graph.graph import UnitGraph

__all__ = ["Random"]


@dataclass(frozen=True)
class Random:
    """Keep a uniformly random subset, fresh each time."""

    learned: ClassVar[bool] = False
    needs: ClassVar[frozenset[Need]] = frozenset()

    def scores(self, graph: UnitGraph, view: View) -> Mapping[str, Tensor]:
        """Draw an order of each group's units; the first drawn is worth most.

        Args:
            graph: The groups.
            view: Needs `generator`.

        Returns:
            Group name → float64 (units,), no two equal.

        Raises:
            MissingImportanceError: `view.generator` is None.

        Source: Caldas et al., Federated Dropout, arXiv 1812.07210.
        """
        generator = view.generator
        if generator is None:
            raise MissingImportanceError("Random needs a generator; pass View(generator=torch.Generator())")
        orders = {name: torch.randperm(group.size, generator=generator) for name, group in graph.groups.items()}
        return {name: -torch.argsort(order).to(torch.float64) for name, order in orders.items()}
