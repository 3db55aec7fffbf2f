"""Patterns: rules that pick which units stay, given how many. One class per file; `registry` finds them by name."""

from sparsekit.patterns.base import Pattern, PatternView, keep_count, select
from sparsekit.patterns.importance import TopImportance
from sparsekit.patterns.magnitude import Magnitude
from sparsekit.patterns.ordered import Ordered
from sparsekit.patterns.random import Random
from sparsekit.patterns.rolling import Rolling
from sparsekit.registry import Registry

__all__ = [
    "Magnitude",
    "Ordered",
    "Pattern",
    "PatternView",
    "Random",
    "Rolling",
    "TopImportance",
    "keep_count",
    "registry",
    "select",
]

registry = Registry(
    "pattern",
    {
        "importance": "sparsekit.patterns.importance:TopImportance",
        "magnitude": "sparsekit.patterns.magnitude:Magnitude",
        "ordered": "sparsekit.patterns.ordered:Ordered",
        "random": "sparsekit.patterns.random:Random",
        "rolling": "sparsekit.patterns.rolling:Rolling",
    },
    group="sparsekit.patterns",
)
