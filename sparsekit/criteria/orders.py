"""Ordered, Random and Scored: orders of the units that no weight decides."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsekit.criteria.base import ScoringContext
from sparsekit.errors import MissingImportanceError
from sparsekit.graph.graph import UnitGraph


@dataclass(frozen=True)
class Ordered:
    """Keep a prefix of each group, units 0 to count − 1, so that smaller submodels nest inside larger ones.

    Source: Horváth et al., FjORD, NeurIPS 2021; Diao et al., HeteroFL, ICLR 2021.
    """

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:  # noqa: ARG002 - the protocol's signature
        """Score each unit by minus its index."""
        return {name: -torch.arange(group.size, dtype=torch.float64) for name, group in graph.groups.items()}


@dataclass(frozen=True)
class Random:
    """Keep a uniformly random subset, fresh each time; the context must have a generator.

    Source: Caldas et al., Federated Dropout, arXiv 1812.07210.
    """

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:
        """Draw an order of each group's units."""
        generator = context.generator
        if generator is None:
            raise MissingImportanceError("Random needs a generator; pass ScoringContext(generator=torch.Generator())")
        orders = {name: torch.randperm(group.size, generator=generator) for name, group in graph.groups.items()}
        return {name: -torch.argsort(order).to(torch.float64) for name, order in orders.items()}


@dataclass(frozen=True)
class Scored:
    """Scores that were computed before.

    Use it to prune to several budgets without scoring again (`Pruned.scores` holds such criteria), or to bring scores of
    your own.

    Args:
        values: Group name → float (units,), larger stays.
        name: Name of the criterion in reports.
        comparable: Whether scores of units of different groups mean the same.
    """

    values: Mapping[str, Tensor] = field(repr=False, compare=False)
    name: str = "Scored"
    comparable: bool = False

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:  # noqa: ARG002 - the protocol's signature
        """Return the scores as they were given."""
        return self.values
