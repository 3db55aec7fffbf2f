"""Allocation: how many units stay in each group."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.cost import CostModel


@runtime_checkable
class Allocation(Protocol):
    """How many units stay in each group."""

    def counts(self, graph: UnitGraph, scores: Mapping[str, Tensor], cost: CostModel | None = None) -> Mapping[str, int]:
        """Decide the numbers.

        Args:
            graph: The groups; tied groups get equal numbers.
            scores: Group name → float (units,), larger stays. Only an allocation across groups reads them.
            cost: What numbers would cost. Only an allocation within a budget reads it.

        Returns:
            Group name → number of units kept, in [1, group.size], for every group.
        """
        ...


def equal_in_ties(graph: UnitGraph, counts: Mapping[str, int]) -> dict[str, int]:
    """Lower the counts of tied groups to the least among them, through chains of ties.

    Ties (a, b) and (b, c) with the counts a: 5, b: 4, c: 3 give 3 everywhere.
    """
    equal = dict(counts)
    for tied in graph.tied_sets:
        equal.update(dict.fromkeys(tied, min(equal[name] for name in tied)))
    return equal
