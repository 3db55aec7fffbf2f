"""as_criterion(): a criterion by its name, for arguments that take either."""

from __future__ import annotations

from sparsekit.criteria import registry
from sparsekit.criteria.base import Criterion
from sparsekit.criteria.magnitude import Magnitude
from sparsekit.errors import InvalidValueError

__all__ = ["as_criterion"]


def as_criterion(criterion: Criterion | str | None) -> Criterion:
    """Return the criterion of a name, a criterion as it is, and the magnitude of the weights for None.

    Raises:
        InvalidValueError: the criterion needs more than its name.
        UnknownNameError: no such criterion.
    """
    if criterion is None:
        return Magnitude()
    if not isinstance(criterion, str):
        return criterion
    found = registry.find(criterion)
    try:
        made: Criterion = found() if isinstance(found, type) else found
    except TypeError as error:
        raise InvalidValueError(
            f"criterion {criterion!r} needs more than its name: {error};"
            f" build it, as in criterion=sparsekit.criteria.{getattr(found, '__name__', criterion)}(...)"
        ) from error
    return made
