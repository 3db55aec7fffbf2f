"""Criteria: the importance of units. `registry` finds them by name."""

from sparsekit.criteria.base import Criterion, ScoringContext, is_comparable
from sparsekit.criteria.orders import Ordered, Random, Scored
from sparsekit.criteria.taylor import Fisher, Taylor
from sparsekit.criteria.wanda import Wanda
from sparsekit.criteria.weights import Magnitude, unit_magnitudes
from sparsekit.registry import Registry

__all__ = [
    "Criterion",
    "Fisher",
    "Magnitude",
    "Ordered",
    "Random",
    "Scored",
    "ScoringContext",
    "Taylor",
    "Wanda",
    "is_comparable",
    "registry",
    "unit_magnitudes",
]

registry = Registry(
    "criterion",
    {
        "fisher": "sparsekit.criteria.taylor:Fisher",
        "magnitude": "sparsekit.criteria.weights:Magnitude",
        "ordered": "sparsekit.criteria.orders:Ordered",
        "position_fisher": "sparsekit.criteria.taylor:position_fisher",
        "random": "sparsekit.criteria.orders:Random",
        "taylor": "sparsekit.criteria.taylor:Taylor",
        "wanda": "sparsekit.criteria.wanda:Wanda",
    },
    group="sparsekit.criteria",
)
