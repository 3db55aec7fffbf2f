"""as_criterion(): a criterion by its name, for arguments that take either."""

from __future__ import annotations

from sparsekit.criteria import registry
from sparsekit.criteria.base import Criterion
from sparsekit.criteria.magnitude import Magnitude
from sparsekit.errors import InvalidValueError


def as_criterion(criterion: Criterion | type | str | None) -> Criterion:
    """Return the criterion of a name or a class, a criterion as it is, and the magnitude of the weights for None.

    Raises:
        InvalidValueError: the criterion needs more than its name, or an object is none.
        UnknownNameError: no such criterion.
    """
    if criterion is None:
        return Magnitude()
    found = registry.find(criterion) if isinstance(criterion, str) else criterion
    try:
        made: Criterion = found() if isinstance(found, type) else found
    except TypeError as error:
        raise InvalidValueError(
            f"criterion {criterion!r} needs more than its name: {error};"
            f" build it, as in criterion=sparsekit.criteria.{getattr(found, '__name__', criterion)}(...)"
        ) from error
    return made
