"""Effects of operators on units: a table from names of operators to handlers. The inputs of any other operator stay whole."""

from typing import Any

from sparsekit.tracing.ops import joining, movement, normalization, pointwise, products, reduction
from sparsekit.tracing.ops.call import HANDLERS, Handler

__all__ = ["MAKE_CONSTANTS", "SAME_IN_TRAIN_MODE", "find_handler"]

del movement, products, reduction  # whose functions have entered the table

MAKE_CONSTANTS = joining.CREATORS | {"expand", "repeat"}
"""Operators that make an axis of equal values even of inputs without labels, and so must always be looked at."""

SAME_IN_TRAIN_MODE = frozenset(normalization.BATCH_NORMS.split())
"""Operators whose numbers and flags, such as whether they train, say nothing about units."""


_OWN = frozenset(("aten", "prims", "quantized", "transformers"))
"""Libraries of operators that the handlers are about."""


def find_handler(func: Any, name: str) -> Handler | None:
    """Return the handler of an operator, or None. Operators of other libraries may have names of torch's own."""
    if name in HANDLERS and func.namespace in _OWN:
        return HANDLERS[name]
    return pointwise.spread if pointwise.is_pointwise(func) else None
