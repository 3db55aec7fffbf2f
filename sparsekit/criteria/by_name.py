"""as_criterion(), with_data(): a criterion by its name, for arguments that take either, and with the data that it reads."""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from sparsekit.criteria import registry
from sparsekit.criteria.base import Criterion
from sparsekit.criteria.batches import Batch, DataDriven, Loss
from sparsekit.criteria.taylor import Fisher
from sparsekit.criteria.weights import Magnitude
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


def reads_data(kind: object) -> bool:
    """Whether a criterion's class takes batches."""
    return isinstance(kind, type) and is_dataclass(kind) and "batches" in {item.name for item in fields(kind)}


def with_data(
    criterion: Criterion | type | str | None,
    batches: Iterable[Batch],
    loss: Loss | None,
    *,
    limit: int = 40,
    progress: bool = False,
) -> Criterion | type:
    """The criterion, with the data where it reads data and has none of its own; `Fisher` where none is given.

    `limit` is the number of batches to score on at most, unless the criterion has one itself.

    Raises:
        UnknownNameError: no such criterion.
    """
    given = {"batches": batches, "loss": loss, "limit": limit, "progress": progress}
    if isinstance(criterion, DataDriven) and criterion.batches is None:
        unset = {"batches": None, "loss": None, "limit": None, "progress": False}
        return replace(criterion, **{name: given[name] for name, value in unset.items() if getattr(criterion, name) is value})
    kind: Any = Fisher if criterion is None else registry.find(criterion) if isinstance(criterion, str) else criterion
    if not reads_data(kind):
        return kind  # type: ignore[no-any-return]
    names = {item.name for item in fields(kind)}
    made: Criterion = kind(**{name: value for name, value in given.items() if name in names})
    return made
