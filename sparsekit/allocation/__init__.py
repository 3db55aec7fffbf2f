"""Allocation: how many units stay in each group, and which. `registry` finds them by name."""

from sparsekit.allocation.base import Allocation, equal_in_ties
from sparsekit.allocation.by_cost import ByCost, Global
from sparsekit.allocation.choose import choose, select
from sparsekit.allocation.isomorphic import Isomorphic
from sparsekit.allocation.knapsack import Knapsack
from sparsekit.allocation.schedule import Schedule
from sparsekit.allocation.sensitivity import Sensitivity
from sparsekit.allocation.shares import PerGroup, Uniform, check_ratio
from sparsekit.allocation.within_budget import UniformWithin
from sparsekit.measure.cost import CostModel
from sparsekit.registry import Registry

__all__ = [
    "Allocation",
    "ByCost",
    "CostModel",
    "Global",
    "Isomorphic",
    "Knapsack",
    "PerGroup",
    "Schedule",
    "Sensitivity",
    "Uniform",
    "UniformWithin",
    "check_ratio",
    "choose",
    "equal_in_ties",
    "registry",
    "select",
]

registry = Registry(
    "allocation",
    {
        "by_cost": "sparsekit.allocation.by_cost:ByCost",
        "global": "sparsekit.allocation.by_cost:Global",
        "isomorphic": "sparsekit.allocation.isomorphic:Isomorphic",
        "knapsack": "sparsekit.allocation.knapsack:Knapsack",
        "per_group": "sparsekit.allocation.shares:PerGroup",
        "sensitivity": "sparsekit.allocation.sensitivity:Sensitivity",
        "uniform": "sparsekit.allocation.shares:Uniform",
        "uniform_within": "sparsekit.allocation.within_budget:UniformWithin",
    },
    group="sparsekit.allocations",
)
