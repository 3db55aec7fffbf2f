"""Handlers for the effects of operators on units, by name of the operator. Operators without a handler are probed."""

from typing import Any

from sparsekit.tracing.ops import joining, movement, normalization, pointwise, products, reduction
from sparsekit.tracing.ops.call import HANDLERS, Handler

__all__ = ["MAKE_CONSTANTS", "SAME_IN_TRAIN_MODE", "find_handler"]

del movement, products, reduction  # whose functions have entered the table

MAKE_CONSTANTS = joining.CREATORS | {"expand", "repeat"}
"""Operators that make an axis of equal values even from inputs without labels, so that they are always handled."""

SAME_IN_TRAIN_MODE = frozenset(normalization.BATCH_NORMS.split())
"""Operators whose numbers and flags, such as whether they train, say nothing about units."""


_OWN = frozenset(("aten", "prims", "quantized", "transformers"))
"""Namespaces of the operators that handlers describe."""


def find_handler(func: Any, name: str) -> Handler | None:
    """Return the handler of an operator, or None. Operators of other namespaces may have the names of torch's operators."""
    if name in HANDLERS and func.namespace in _OWN:
        return HANDLERS[name]
    return pointwise.spread if pointwise.is_pointwise(func) else None
