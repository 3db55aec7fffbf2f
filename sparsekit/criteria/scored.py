"""Scored: scores that are known already."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from sparsekit.criteria.base import ScoringContext
from sparsekit.graph.graph import UnitGraph


@dataclass(frozen=True)
class Scored:
    """Return scores that were computed before.

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
