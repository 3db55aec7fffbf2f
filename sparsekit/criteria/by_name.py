"""as_criterion() and with_data(): a criterion by its name, and with data."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sparsekit.criteria import registry
from sparsekit.criteria.base import Criterion
from sparsekit.criteria.batches import Batch, DataDriven, Loss
from sparsekit.criteria.taylor import Fisher
from sparsekit.criteria.weights import Magnitude
from sparsekit.errors import InvalidValueError


def as_criterion(criterion: Criterion | type | str | None) -> Criterion:
    """Return the criterion of a name or a class, a criterion itself, and the magnitude of the weights for None."""
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
    criterion: Criterion | type | str | None, batches: Iterable[Batch], loss: Loss | None, *, progress: bool | None = False
) -> Criterion:
    """Return a criterion; if it reads data and has none, it gets these, at most 40 of them. None is `Fisher`."""
    made = Fisher() if criterion is None else as_criterion(criterion)
    if not isinstance(made, DataDriven) or made.batches is not None:
        return made
    given: dict[str, Any] = {"batches": batches, "loss": loss, "limit": 40, "progress": progress}
    return replace(made, **{name: value for name, value in given.items() if getattr(made, name) in (None, False)})
