"""The last states of several layers, stacked along axis 0, each with units of its own: picked, sliced, laid out by layer."""

from __future__ import annotations

import math

from sparsekit.labels.values import TensorLabels
from sparsekit.tracing.ops.call import Call

__all__ = ["reshape_stacked", "slice_stacked"]

_ACROSS = "stacked states of several layers are cut across layers"


def _stack(parts: tuple[TensorLabels, ...]) -> TensorLabels:
    """Labels of a stack; an ordinary tensor if all parts have the same units."""
    first = parts[0]
    if all(first.same(part) for part in parts):
        return TensorLabels((None, *first.axes))
    return TensorLabels((None, *([None] * len(first.axes))), parts=parts)


def reshape_stacked(call: Call, parts: tuple[TensorLabels, ...]) -> TensorLabels | None:
    """Axis 0 of layers and directions, as torch's documentation lays it out: `h.view(layers, directions, batch, -1)`."""
    before, after = tuple(call.arguments["self"].shape), tuple(call.outputs[0].shape)
    extra = len(after) - len(before)
    if extra < 0 or after[extra + 1 :] != before[1:] or math.prod(after[: extra + 1]) != before[0] or before[0] != len(parts):
        call.fix_inputs(_ACROSS)
        return None
    if extra == 0:
        return _stack(parts)
    per = before[0] // after[0]
    blocks = [parts[k : k + per] for k in range(0, len(parts), per)]
    if any(not block[0].same(part) for block in blocks for part in block):
        call.fix_inputs(_ACROSS)
        return None
    lead = (None,) * extra
    return _stack(tuple(TensorLabels((*lead, *block[0].axes)) for block in blocks))


def slice_stacked(call: Call, parts: tuple[TensorLabels, ...]) -> TensorLabels | None:
    """Some of the layers, or a part of the batch; the units of a layer can only be taken whole."""
    tensor = call.arguments["self"]
    dim = call.arg("dim", 0) % tensor.dim()
    start, stop, step = slice(call.arg("start"), call.arg("end"), call.arg("step", 1)).indices(tensor.shape[dim])
    chosen = range(start, stop, step)
    if dim == 0 and len(chosen):
        return _stack(tuple(parts[k] for k in chosen))
    if len(chosen) == tensor.shape[dim] or all(part.axes[dim - 1] is None for part in parts):
        return _stack(parts)
    call.fix_inputs(_ACROSS)
    return None
