"""Learned, Ordered, Random and Scored: criteria that do not depend on the weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsekit.criteria.base import ScoringContext
from sparsekit.errors import MissingImportanceError
from sparsekit.graph.graph import UnitGraph


@dataclass(frozen=True)
class Learned:
    """The rule of FedLPS: keep the units at or above the (1 − ratio)-quantile of their group's importance.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), importance-derived sparse pattern.
    """

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:
        """Return the importance itself: views, not copies."""
        importance = {} if context.importance is None else context.importance
        for name in graph.groups:
            if name not in importance:
                raise MissingImportanceError(
                    f"Learned needs importance for group {name!r}; pass ScoringContext(importance={{group: scores}})"
                )
        return importance


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
