"""Allocation: how many units stay in each group, and which. One allocation per file; `registry` finds them by name."""

from sparsekit.allocation.base import Allocation, CostModel, equal_in_ties
from sparsekit.allocation.by_cost import ByCost
from sparsekit.allocation.choose import choose, select
from sparsekit.allocation.schedule import Schedule
from sparsekit.allocation.uniform import Uniform
from sparsekit.registry import Registry

__all__ = ["Allocation", "ByCost", "CostModel", "Schedule", "Uniform", "choose", "equal_in_ties", "registry", "select"]

registry = Registry(
    "allocation",
    {
        "by_cost": "sparsekit.allocation.by_cost:ByCost",
        "uniform": "sparsekit.allocation.uniform:Uniform",
    },
    group="sparsekit.allocations",
)
