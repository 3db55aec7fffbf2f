"""Criteria: what a unit is worth. One class per file; `registry` finds them by name."""

from sparsekit.criteria.base import Criterion, View
from sparsekit.criteria.learned import Learned
from sparsekit.criteria.magnitude import Magnitude
from sparsekit.criteria.ordered import Ordered
from sparsekit.criteria.random import Random
from sparsekit.registry import Registry

__all__ = ["Criterion", "Learned", "Magnitude", "Ordered", "Random", "View", "registry"]

registry = Registry(
    "criterion",
    {
        "learned": "sparsekit.criteria.learned:Learned",
        "magnitude": "sparsekit.criteria.magnitude:Magnitude",
        "ordered": "sparsekit.criteria.ordered:Ordered",
        "random": "sparsekit.criteria.random:Random",
    },
    group="sparsekit.criteria",
    renamed={"importance": "learned"},
)
