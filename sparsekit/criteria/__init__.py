"""Criteria: what a unit is worth. One class per file; `registry` finds them by name."""

from sparsekit.criteria.activation import Activation
from sparsekit.criteria.base import Criterion, View, is_comparable
from sparsekit.criteria.batch_norm_scale import BatchNormScale
from sparsekit.criteria.fisher import Fisher
from sparsekit.criteria.geometric_median import GeometricMedian
from sparsekit.criteria.lamp import Lamp
from sparsekit.criteria.learned import Learned
from sparsekit.criteria.magnitude import Magnitude
from sparsekit.criteria.magnitudes import unit_magnitudes
from sparsekit.criteria.normalised import Normalised
from sparsekit.criteria.ordered import Ordered
from sparsekit.criteria.random import Random
from sparsekit.criteria.taylor import Taylor
from sparsekit.criteria.torch_pruning import TorchPruning
from sparsekit.registry import Registry

__all__ = [
    "Activation",
    "BatchNormScale",
    "Criterion",
    "Fisher",
    "GeometricMedian",
    "Lamp",
    "Learned",
    "Magnitude",
    "Normalised",
    "Ordered",
    "Random",
    "Taylor",
    "TorchPruning",
    "View",
    "is_comparable",
    "registry",
    "unit_magnitudes",
]

registry = Registry(
    "criterion",
    {
        "activation": "sparsekit.criteria.activation:Activation",
        "batch_norm_scale": "sparsekit.criteria.batch_norm_scale:BatchNormScale",
        "fisher": "sparsekit.criteria.fisher:Fisher",
        "geometric_median": "sparsekit.criteria.geometric_median:GeometricMedian",
        "lamp": "sparsekit.criteria.lamp:Lamp",
        "learned": "sparsekit.criteria.learned:Learned",
        "magnitude": "sparsekit.criteria.magnitude:Magnitude",
        "normalised": "sparsekit.criteria.normalised:Normalised",
        "ordered": "sparsekit.criteria.ordered:Ordered",
        "random": "sparsekit.criteria.random:Random",
        "rolling": "sparsekit_fl.policies.rolling:Rolling",  # of the federated layer, by name alone
        "taylor": "sparsekit.criteria.taylor:Taylor",
        "torch_pruning": "sparsekit.criteria.torch_pruning:TorchPruning",
    },
    group="sparsekit.criteria",
)
