"""Operators that fill, join and write tensors: constants, concatenation, padding, moves by index and by patches."""

from dataclasses import replace

import numpy as np
from torch import Tensor

from sparsekit.labels.values import ALWAYS_ZERO, NO_UNIT, NOT_ZERO, Labels, TensorLabels, joined, uniform
from sparsekit.tracing.ops.call import Call, Outputs, handles
from sparsekit.tracing.ops.pointwise import combine
from sparsekit.tracing.ops.probe import probe

CREATORS = frozenset(
    # An empty tensor is filled before it is used; until then, it fits any unit.
    {"zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "scalar_tensor", "empty", "new_empty"}
)


@handles("zeros_like ones_like empty_like full_like rand_like randn_like")
def _like(call: Call) -> Outputs:
    labels = call.labels("self")
    zero = ALWAYS_ZERO if call.name == "zeros_like" else NOT_ZERO
    return TensorLabels(tuple(a if a is None else Labels(a.nodes, np.full_like(a.sources, zero)) for a in labels.axes))


@handles(" ".join(sorted(CREATORS)) + " fill zero")
def _create(call: Call) -> Outputs:
    value = call.arg("fill_value", call.arg("value", 1))
    is_zero = "zero" in call.name or (not isinstance(value, Tensor) and value == 0)
    zero = ALWAYS_ZERO if is_zero else NOT_ZERO
    given = (uniform(size, zero, call.tracer.given.held(size)) if size > 1 else None for size in call.out.shape)
    return TensorLabels(tuple(given))


@handles("cat stack concat")
def _cat(call: Call) -> Outputs:
    tensors = [t for t in call.arguments["tensors"] if t.numel()] or call.arguments["tensors"]
    stacked, shape = call.name == "stack", list(call.out.shape)
    dim = call.arg("dim", 0) % len(shape)
    shape[dim] = 1
    known = [_inserted(call.tracer.labels(t), dim) if stacked else call.tracer.labels(t, dim) for t in tensors]
    others = combine(call, [labels.with_axis(dim, None) for labels in known], [shape] * len(known), shape)
    for labels in known:  # a concatenated state entry makes the units at its positions
        for d in range(len(shape)):
            call.tracer.make(labels, d)
    if all(labels.units[dim] is None for labels in known):
        return others
    return others.with_axis(
        dim,
        joined(
            [
                labels.units[dim] or Labels(np.full(t.shape[dim], NO_UNIT), np.full(t.shape[dim], NOT_ZERO))
                for t, labels in zip(tensors, known, strict=True)
            ]
        ),
    )


def _inserted(labels: TensorLabels, dim: int) -> TensorLabels:
    return replace(labels, axes=(*labels.axes[:dim], None, *labels.axes[dim:]))


@handles(
    "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d"
)
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


def _same_for_all_units(call: Call, index: Tensor, labels: TensorLabels, dim: int) -> bool:
    """Return False if an index has an axis of the units, and so may select different positions for different units."""
    if index.dim() != len(labels.axes):
        return True
    along = call.tracer.labels(index)
    for d, axis in enumerate(labels.axes):
        own = along.axes[d]
        if d != dim and axis is not None and not axis.is_uniform and (own is None or not own.is_uniform):
            return False
    return True


@handles("index_add index_copy scatter_add")
def _indexed(call: Call) -> Outputs:
    tracer, out = call.tracer, call.arguments["self"]
    source, index = call.arguments.get("source", call.arguments.get("src")), call.arguments.get("index")
    if not isinstance(source, Tensor) or not isinstance(index, Tensor) or source.dim() != out.dim() or not out.dim():
        call.fix_inputs(f"moved by {call.name!r}")
        return None
    dim = call.arg("dim", 0) % out.dim()
    pieces = [tracer.labels(out, dim), tracer.labels(source, dim)]
    if not all(_same_for_all_units(call, index, labels, dim) for labels in pieces):
        return probe(call, f"moved by {call.name!r} with an index of its own for each unit")
    tracer.fix(tracer.labels(index), f"used as an index by {call.name!r}")
    tracer.fix([labels.axes[dim] for labels in pieces], f"moved by {call.name!r} along its units")
    flat = [labels.with_axis(dim, None) for labels in pieces]
    shapes = [[size if d != dim else 1 for d, size in enumerate(t.shape)] for t in (out, source)]
    if shapes[0] != shapes[1]:
        call.fix_inputs(f"moved by {call.name!r}")
        return None
    return combine(call, flat, shapes, shapes[0], "add")


@handles("gather")
def _gather(call: Call) -> Outputs:
    tracer, tensor, index = call.tracer, call.arguments["self"], call.arguments["index"]
    dim = call.dim()
    labels = tracer.labels(tensor, dim)
    if not _same_for_all_units(call, index, labels, dim):
        return probe(call, f"moved by {call.name!r} with an index of its own for each unit")
    tracer.fix(tracer.labels(index), "used as an index by 'gather'")
    axes: list[Labels | None] = []
    for d, axis in enumerate(labels.axes):
        held = axis is not None and not axis.is_uniform
        if held and (d == dim or index.shape[d] != tensor.shape[d]):
            tracer.fix(axis, "picked by 'gather' along its units")
        axes.append(axis if held and d != dim and index.shape[d] == tensor.shape[d] else None)
    return TensorLabels(tuple(axes))


@handles("im2col")
def _patches(call: Call) -> Outputs:
    """Repeat the label of each channel: patches have one position for each tap of the kernel."""
    x, out, kernel = call.labels("self"), call.outputs[0], call.arg("kernel_size")
    dim, taps = out.dim() - 2, int(np.prod(kernel))
    call.tracer.fix(x.axes[dim + 1 :], "cut into patches along an axis of units")
    channel = x.units[dim]
    axes: list[Labels | None] = [None] * out.dim()
    if channel is not None:
        axes[dim] = channel.take(np.repeat(np.arange(channel.size, dtype=np.int64), taps))
    return TensorLabels(tuple(axes))


@handles("col2im")
def _from_patches(call: Call) -> Outputs:
    """Unite the positions of each channel, the taps of the kernel, which are summed."""
    x, out, kernel = call.labels("self"), call.outputs[0], call.arg("kernel_size")
    dim, taps = out.dim() - 3, int(np.prod(kernel))
    call.tracer.fix(x.axes[-1], "an axis of units is laid out as patches")
    column = x.units[dim]
    axes: list[Labels | None] = [None] * out.dim()
    if column is not None:
        rows = column.nodes.reshape(-1, taps)
        sources = column.sources.reshape(-1, taps)
        joint = sources[:, 0]
        for k in range(1, taps):
            call.tracer.unite(rows[:, 0], rows[:, k])
            joint = call.tracer.both(joint, sources[:, k])
        axes[dim] = Labels(rows[:, 0], joint)
    return TensorLabels(tuple(axes))
