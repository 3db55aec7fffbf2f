"""Random: units drawn uniformly without replacement stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsekit.criteria.base import View
from sparsekit.errors import MissingImportanceError
from sparsekit.graph.graph import UnitGraph


@dataclass(frozen=True)
class Random:
    """Keep a uniformly random subset, fresh each time; the view must have a generator.

    Source: Caldas et al., Federated Dropout, arXiv 1812.07210.
    """

    def scores(self, graph: UnitGraph, view: View) -> Mapping[str, Tensor]:
        """Draw an order of each group's units; the first drawn is worth most, and no two are worth the same."""
        generator = view.generator
        if generator is None:
            raise MissingImportanceError("Random needs a generator; pass View(generator=torch.Generator())")
        orders = {name: torch.randperm(group.size, generator=generator) for name, group in graph.groups.items()}
        return {name: -torch.argsort(order).to(torch.float64) for name, order in orders.items()}
