"""Allocation: how many units stay in each group, and which. `registry` finds allocations by name."""

from sparsekit.allocation.by_cost import by_cost, by_loss, global_ranking
from sparsekit.allocation.limits import PreferredMultiple
from sparsekit.allocation.problem import Allocation, Problem, Schedule, allocate
from sparsekit.allocation.shares import by_ratio, check_ratio, make_mask, mask_from_scores, ratio_counts, uniform
from sparsekit.measure.cost import CostModel
from sparsekit.registry import Registry

__all__ = [
    "Allocation",
    "CostModel",
    "PreferredMultiple",
    "Problem",
    "Schedule",
    "allocate",
    "by_cost",
    "by_loss",
    "by_ratio",
    "check_ratio",
    "global_ranking",
    "make_mask",
    "mask_from_scores",
    "ratio_counts",
    "registry",
    "uniform",
]

registry = Registry(
    "allocation",
    {
        "by_cost": "sparsekit.allocation.by_cost:by_cost",
        "by_loss": "sparsekit.allocation.by_cost:by_loss",
        "global": "sparsekit.allocation.by_cost:global_ranking",
        "uniform": "sparsekit.allocation.shares:uniform",
    },
    group="sparsekit.allocations",
)
