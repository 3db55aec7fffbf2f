"""What each operator does to units: a table from operator names to handlers. An operator in no table fixes its inputs."""

from __future__ import annotations

from typing import Any

from sparsekit.tracing.ops import (
    attention,
    contraction,
    joining,
    movement,
    normalisation,
    pointwise,
    reduction,
    reshape,
    scatter,
)
from sparsekit.tracing.ops.call import Handler

__all__ = ["MAKE_CONSTANTS", "find_handler"]

MAKE_CONSTANTS = joining.CREATORS | {"expand"}
"""Operators that make an axis of equal values even of inputs without labels, and so must always be looked at."""

_HANDLERS: dict[str, Handler] = {
    **pointwise.HANDLERS,
    **movement.HANDLERS,
    **reshape.HANDLERS,
    **joining.HANDLERS,
    **contraction.HANDLERS,
    **attention.HANDLERS,
    **normalisation.HANDLERS,
    **reduction.HANDLERS,
    **scatter.HANDLERS,
}


def find_handler(func: Any, name: str) -> Handler | None:
    """The handler of an operator, or None if it is not known."""
    if name in _HANDLERS:
        return _HANDLERS[name]
    return pointwise.spread if pointwise.is_pointwise(func) else None
