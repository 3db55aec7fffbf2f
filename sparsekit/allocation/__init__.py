"""Allocation: how many units stay in each group, and which. One allocation per file; `registry` finds them by name."""

from sparsekit.allocation.base import Allocation, equal_in_ties
from sparsekit.allocation.by_cost import ByCost
from sparsekit.allocation.choose import choose, select
from sparsekit.allocation.global_ import Global
from sparsekit.allocation.isomorphic import Isomorphic
from sparsekit.allocation.knapsack import Knapsack
from sparsekit.allocation.per_group import PerGroup
from sparsekit.allocation.schedule import Schedule
from sparsekit.allocation.sensitivity import Sensitivity
from sparsekit.allocation.uniform import Uniform, check_ratio
from sparsekit.allocation.uniform_within import UniformWithin
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
        "global": "sparsekit.allocation.global_:Global",
        "isomorphic": "sparsekit.allocation.isomorphic:Isomorphic",
        "knapsack": "sparsekit.allocation.knapsack:Knapsack",
        "per_group": "sparsekit.allocation.per_group:PerGroup",
        "sensitivity": "sparsekit.allocation.sensitivity:Sensitivity",
        "uniform": "sparsekit.allocation.uniform:Uniform",
        "uniform_within": "sparsekit.allocation.uniform_within:UniformWithin",
    },
    group="sparsekit.allocations",
)
