"""Operators that fill, join and write tensors: constants, concatenation, padding, copies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from sparsekit.layers.labels.joint import inserted
from sparsekit.layers.labels.values import ALWAYS_ZERO, NO_UNIT, NOT_ZERO, Labels, TensorLabels, uniform
from sparsekit.tracing.ops.call import Call, Outputs, table

CREATORS = frozenset(
    # What is empty is filled before it is used, and until then fits any unit.
    {"zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "scalar_tensor", "empty", "new_empty"}
)


def _like(call: Call) -> Outputs:
    labels = call.labels("self")
    zero = ALWAYS_ZERO if call.name == "zeros_like" else NOT_ZERO
    axes = (a if a is None else Labels(a.nodes, np.full(a.size, zero, dtype=np.int64)) for a in labels.axes)
    return TensorLabels(tuple(axes))


def _create(call: Call) -> Outputs:
    out = call.outputs[0]
    is_zero = "zeros" in call.name or call.arg("fill_value", 1) == 0
    return TensorLabels(tuple(uniform(size, ALWAYS_ZERO if is_zero else NOT_ZERO) if size > 1 else None for size in out.shape))


def _fill(call: Call) -> Outputs:
    out = call.outputs[0] if call.outputs else call.arguments["self"]
    value = call.arg("value", 0)
    zero = call.name == "zero" or (not isinstance(value, Tensor) and value == 0)
    return TensorLabels(tuple(uniform(size, ALWAYS_ZERO if zero else NOT_ZERO) if size > 1 else None for size in out.shape))


def merge(call: Call, pieces: Sequence[Labels | None], owners: Sequence[TensorLabels]) -> Labels | None:
    """Labels of an axis that several tensors share without broadcasting: the units at one position are one."""
    held = [axis for axis in pieces if axis is not None and not axis.is_uniform]
    if not held:
        return pieces[0] if all(axis is not None for axis in pieces) else None
    if any(axis is None for axis in pieces):
        for axis, owner in zip(pieces, owners, strict=True):
            if axis is not None and not axis.is_uniform:
                call.tracer.fix(
                    axis, f"joined by {call.name!r} with values that belong to no unit", quiet=owner.entry is not None
                )
        return None
    sources = pieces[0].sources if pieces[0] is not None else held[0].sources
    for axis in pieces[1:]:
        assert axis is not None
        sources = call.tracer.both(sources, axis.sources)
    for axis in held[1:]:
        call.tracer.unite(held[0].nodes, axis.nodes)
    return Labels(held[0].nodes, sources)


def _cat(call: Call) -> Outputs:
    tensors = [t for t in call.arguments["tensors"] if not (t.dim() == 1 and t.shape[0] == 0)]
    rank = call.outputs[0].dim()
    stacked = call.name == "stack"
    dim = call.arg("dim", 0) % rank
    known = [call.tracer.labels(t) if stacked else call.tracer.labels(t, dim) for t in tensors]
    if stacked:
        known = [inserted(k, dim) for k in known]
    axes: list[Labels | None] = []
    for d in range(rank):
        pieces = [k.axes[d] for k in known]
        if d != dim:
            axes.append(merge(call, pieces, known))
        elif stacked or all(axis is None or axis.is_uniform for axis in pieces):
            axes.append(None)
        else:
            none = np.full(0, NO_UNIT, dtype=np.int64)
            filled = [
                (np.full(t.shape[d], NO_UNIT, dtype=np.int64), np.full(t.shape[d], NOT_ZERO, dtype=np.int64))
                if axis is None or axis.is_uniform
                else (axis.nodes, axis.sources)
                for t, axis in zip(tensors, pieces, strict=True)
            ]
            nodes = np.concatenate([none, *(pair[0] for pair in filled)])
            axes.append(Labels(nodes, np.concatenate([none, *(pair[1] for pair in filled)])))
    for k in known:  # a concatenated state entry makes the units at its positions
        if k.entry is not None:
            for d in range(rank):
                call.tracer.make(k, d)
    return TensorLabels(tuple(axes))


def _pad(call: Call) -> Outputs:
    labels, tensor = call.labels("self"), call.arguments["self"]
    pad = list(call.arg("pad", call.arg("padding", [])))
    value = call.arg("value", 0) if call.name == "constant_pad_nd" else 0
    axes = list(labels.axes)
    for k in range(len(pad) // 2):
        d, low, high = tensor.dim() - 1 - k, pad[2 * k], pad[2 * k + 1]
        axis = axes[d]
        if axis is None or (low == 0 and high == 0):
            continue
        if call.name != "constant_pad_nd" or low < 0 or high < 0:
            call.tracer.fix(axis, f"an axis of units is padded by {call.name!r}")
            axes[d] = None
        elif axis.is_uniform:
            axes[d] = None
        else:
            nodes = np.pad(axis.nodes, (low, high), constant_values=NO_UNIT)
            axes[d] = Labels(nodes, np.pad(axis.sources, (low, high), constant_values=NOT_ZERO))
    if value != 0:
        axes = [axis if axis is None else axis.without_zero() for axis in axes]
    return TensorLabels(tuple(axes))


def _copy(call: Call) -> Outputs:
    target, source = call.arguments["self"], call.labels("src")
    missing = target.dim() - len(source.axes)
    axes: list[Labels | None] = [uniform(size) if size > 1 else None for size in target.shape[: max(missing, 0)]]
    for axis, size in zip(source.axes, target.shape[max(missing, 0) :], strict=False):
        if axis is not None and axis.size != size:
            call.tracer.fix(axis, "a single unit is expanded")
            axis = None
        axes.append(axis)
    return TensorLabels(tuple(axes))


HANDLERS = table(
    ("zeros_like ones_like empty_like full_like rand_like randn_like", _like),
    (" ".join(sorted(CREATORS)), _create),
    ("fill zero", _fill),
    ("cat stack concat", _cat),
    ("constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d", _pad),
    ("replication_pad1d replication_pad2d replication_pad3d", _pad),
    ("copy", _copy),
)
