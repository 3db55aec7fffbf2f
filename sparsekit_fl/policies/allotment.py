"""within_uniform(): how many units of each group a submodel keeps that costs no more than the uniform one of a ratio."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from sparsekit.allocation.base import Allocation
from sparsekit.allocation.by_cost import ByCost
from sparsekit.allocation.global_ import Global
from sparsekit.allocation.isomorphic import Isomorphic
from sparsekit.allocation.uniform import Uniform
from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.budget import Budget
from sparsekit.measure.cost import CostModel

__all__ = ["AllotmentMetric", "Allotted", "within_uniform"]

Allotted: TypeAlias = Literal["uniform", "by_cost", "global", "isomorphic"]
"""Every group keeps the same share of its units; or the cost of that is spent as the allocation of this name says."""

AllotmentMetric: TypeAlias = Literal["flops", "flops and bytes"]
"""In what a submodel must not cost more than the uniform one."""

_WITHIN: Mapping[str, Callable[[Budget], Allocation]] = {
    "by_cost": lambda budget: ByCost(budget, rise=0.0),  # a client's importance differs too little between groups for more
    "global": Global,
    "isomorphic": Isomorphic,
}
_METRICS: Mapping[str, tuple[str, ...]] = {"flops": ("flops",), "flops and bytes": ("flops", "bytes")}


def within_uniform(
    graph: UnitGraph, costs: CostModel, ratio: float, *, allocation: Allotted = "uniform", metric: AllotmentMetric = "flops"
) -> Allocation:
    """An allocation that costs no more than the uniform one of a ratio.

    A device that can train the uniform submodel can therefore train this one, as far as `metric` says what limits it.

    Args:
        graph: The units.
        costs: What numbers of units cost.
        ratio: Share of units that the uniform submodel keeps in each group, in (0, 1].
        allocation: How the cost is spent.
        metric: What is held to that of the uniform submodel: FLOPs of a forward pass, or also bytes, which stand for
            memory and for what goes over the wire.

    Raises:
        InvalidValueError: a ratio outside (0, 1].
    """
    uniform = Uniform(ratio)
    if allocation == "uniform" or ratio == 1.0:
        return uniform
    spent = costs.costs(uniform.counts(graph, {}))
    return _WITHIN[allocation](Budget(**{name: spent[name] for name in _METRICS[metric]}))
