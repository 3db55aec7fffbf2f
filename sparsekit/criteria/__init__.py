"""Criteria: what a unit is worth. One class per file; `registry` finds them by name."""

from sparsekit.criteria.base import Criterion, View, is_comparable
from sparsekit.criteria.fisher import Fisher
from sparsekit.criteria.learned import Learned
from sparsekit.criteria.magnitude import Magnitude
from sparsekit.criteria.normalised import Normalised
from sparsekit.criteria.ordered import Ordered
from sparsekit.criteria.random import Random
from sparsekit.criteria.taylor import Taylor
from sparsekit.registry import Registry

__all__ = [
    "Criterion",
    "Fisher",
    "Learned",
    "Magnitude",
    "Normalised",
    "Ordered",
    "Random",
    "Taylor",
    "View",
    "is_comparable",
    "registry",
]

registry = Registry(
    "criterion",
    {
        "fisher": "sparsekit.criteria.fisher:Fisher",
        "learned": "sparsekit.criteria.learned:Learned",
        "magnitude": "sparsekit.criteria.magnitude:Magnitude",
        "normalised": "sparsekit.criteria.normalised:Normalised",
        "ordered": "sparsekit.criteria.ordered:Ordered",
        "random": "sparsekit.criteria.random:Random",
        "taylor": "sparsekit.criteria.taylor:Taylor",
    },
    group="sparsekit.criteria",
    renamed={"importance": "learned"},
)
