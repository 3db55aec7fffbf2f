"""Criteria: the importance of units. `registry` finds them by name."""

from dataclasses import replace
from typing import Any

from sparsekit.criteria.base import Criterion, ScoringContext, is_comparable
from sparsekit.criteria.batches import Batches, DataDriven, Loss
from sparsekit.criteria.data_driven import Fisher, Taylor, Wanda
from sparsekit.criteria.torch_pruning import TorchPruning
from sparsekit.criteria.weights import Magnitude, Ordered, Random, Scored, unit_magnitudes
from sparsekit.errors import InvalidValueError
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
    "TorchPruning",
    "Wanda",
    "is_comparable",
    "registry",
    "unit_magnitudes",
]

registry = Registry(
    "criterion",
    {
        "fisher": "sparsekit.criteria.data_driven:Fisher",
        "magnitude": "sparsekit.criteria.weights:Magnitude",
        "ordered": "sparsekit.criteria.weights:Ordered",
        "position_fisher": "sparsekit.criteria.data_driven:position_fisher",
        "random": "sparsekit.criteria.weights:Random",
        "taylor": "sparsekit.criteria.data_driven:Taylor",
        "wanda": "sparsekit.criteria.data_driven:Wanda",
    },
    group="sparsekit.criteria",
)


def as_criterion(criterion: Criterion | type | str | None) -> Criterion:
    """Return a criterion, given the criterion itself, its class or its name; `Magnitude` for None."""
    if criterion is None:
        return Magnitude()
    found = registry.find(criterion) if isinstance(criterion, str) else criterion
    try:
        made: Criterion = found() if callable(found) and (isinstance(found, type) or not hasattr(found, "scores")) else found
    except TypeError as error:
        raise InvalidValueError(
            f"criterion {criterion!r} needs more than its name: {error};"
            f" build it, as in criterion=sparsekit.criteria.{getattr(found, '__name__', criterion)}(...)"
        ) from error
    return made


def with_data(
    criterion: Criterion | type | str | None, batches: Batches, loss: Loss | None, *, progress: bool | None = False
) -> Criterion:
    """Return a criterion as `as_criterion` does, but `Fisher` for None. If it needs batches and has none, it gets these.

    Such a criterion uses at most 40 batches, unless it has another limit.
    """
    made = Fisher() if criterion is None else as_criterion(criterion)
    if not isinstance(made, DataDriven) or made.batches is not None:
        return made
    given: dict[str, Any] = {"batches": batches, "loss": loss, "limit": 40, "progress": progress}
    return replace(made, **{name: value for name, value in given.items() if getattr(made, name) in (None, False)})
