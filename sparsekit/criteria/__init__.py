"""Patterns: rules that pick which units stay, given how many. One class per file; `registry` finds them by name."""

from sparsekit.criteria.base import Pattern, PatternView, keep_count, select
from sparsekit.criteria.importance import TopImportance
from sparsekit.criteria.magnitude import Magnitude
from sparsekit.criteria.ordered import Ordered
from sparsekit.criteria.random import Random
from sparsekit.registry import Registry

__all__ = [
    "Magnitude",
    "Ordered",
    "Pattern",
    "PatternView",
    "Random",
    "TopImportance",
    "keep_count",
    "registry",
    "select",
]

registry = Registry(
    "pattern",
    {
        "importance": "sparsekit.criteria.importance:TopImportance",
        "magnitude": "sparsekit.criteria.magnitude:Magnitude",
        "ordered": "sparsekit.criteria.ordered:Ordered",
        "random": "sparsekit.criteria.random:Random",
    },
    group="sparsekit.criteria",
)
