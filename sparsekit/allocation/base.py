"""Allocation and CostModel: how many units stay in each group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.tracker import Tracker

__all__ = ["Allocation", "CostModel", "Tracker", "equal_in_ties", "make_tracker", "needed"]


class CostModel(Protocol):
    """What a model costs when its groups keep given numbers of units."""

    def costs(self, counts: Mapping[str, int]) -> Mapping[str, float]:
        """Predict the cost.

        Args:
            counts: Group name → number of units kept, for every group.

        Returns:
            Metric → amount: "flops" of one example, "params", "bytes", "memory" and "latency_ms", or some of them.
        """
        ...


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


def needed(cost: CostModel | None, allocation: object) -> CostModel:
    """The cost model that an allocation within a budget reads.

    Raises:
        InvalidValueError: there is none.
    """
    if cost is None:
        raise InvalidValueError(
            f"{type(allocation).__name__} needs costs to meet its budget;"
            " pass cost=sparsekit.cost_model(model, *inputs, graph=graph)"
        )
    return cost


def make_tracker(cost: CostModel, counts: Mapping[str, int], metrics: Sequence[str]) -> Tracker:
    """Costs at widths that change step by step: the model's own tracker if it has one, else one that asks for all costs anew.

    Args:
        cost: The costs.
        counts: Group name → units kept at the start.
        metrics: What is tracked.
    """
    own = getattr(cost, "tracker", None)
    if own is not None:
        found: Tracker = own(counts, metrics)
        return found
    return _SlowTracker(cost, counts, metrics)


class _SlowTracker:
    """A tracker of any cost model, which predicts everything at each step."""

    def __init__(self, cost: CostModel, counts: Mapping[str, int], metrics: Sequence[str]) -> None:
        self._cost = cost
        self._counts = dict(counts)
        self._metrics = tuple(metrics)
        self._totals = self._at(self._counts)

    def _at(self, counts: Mapping[str, int]) -> dict[str, float]:
        costs = self._cost.costs(counts)
        return {name: costs[name] for name in self._metrics}

    def totals(self) -> Mapping[str, float]:
        return self._totals

    def change(self, groups: Sequence[str], count: int) -> Mapping[str, float]:
        after = self._at({**self._counts, **dict.fromkeys(groups, count)})
        return {name: after[name] - total for name, total in self._totals.items()}

    def gain(self, groups: Sequence[str], count: int, limits: Mapping[str, float]) -> float:
        changes = self.change(groups, count)
        return sum(-changes[name] / limit for name, limit in limits.items() if self._totals[name] > limit)

    def move(self, groups: Sequence[str], count: int) -> None:
        self._counts.update(dict.fromkeys(groups, count))
        self._totals = self._at(self._counts)
