"""Operators that move values by index or by patches along other axes than that of the units: graphs, unfold and fold."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from sparsekit.layers.labels.values import Labels, TensorLabels
from sparsekit.tracing.ops.call import Call, Outputs, table
from sparsekit.tracing.ops.pointwise import combine


def _same_for_all_units(call: Call, index: Tensor, labels: TensorLabels, dim: int) -> bool:
    """False if an index as wide as the units moves them apart; then they are fixed."""
    if index.dim() != len(labels.axes):
        return True
    along = call.tracer.labels(index)
    for d, axis in enumerate(labels.axes):
        own = along.axes[d]
        if d != dim and axis is not None and not axis.is_uniform and (own is None or not own.is_uniform):
            call.fix_inputs(f"moved by {call.name!r} with an index of its own for each unit")
            return False
    return True


def _indexed(call: Call) -> Outputs:
    """`self` with `source` added or written at positions along one axis."""
    tracer, out = call.tracer, call.arguments["self"]
    source, index = call.arguments.get("source", call.arguments.get("src")), call.arguments.get("index")
    if not isinstance(source, Tensor) or not isinstance(index, Tensor) or source.dim() != out.dim() or not out.dim():
        call.fix_inputs(f"moved by {call.name!r}")
        return None
    dim = call.arg("dim", 0) % out.dim()
    pieces = [tracer.labels(out, dim), tracer.labels(source, dim)]
    if not all(_same_for_all_units(call, index, labels, dim) for labels in pieces):
        return None
    tracer.fix(tracer.labels(index), f"used as an index by {call.name!r}")
    for labels in pieces:
        tracer.fix(labels.axes[dim], f"moved by {call.name!r} along its units")
    flat = [labels.with_axis(dim, None) for labels in pieces]
    shapes = [[size if d != dim else 1 for d, size in enumerate(t.shape)] for t in (out, source)]
    if shapes[0] != shapes[1]:
        call.fix_inputs(f"moved by {call.name!r}")
        return None
    return combine(call, flat, shapes, shapes[0], "add")


def _gather(call: Call) -> Outputs:
    """Values picked along one axis."""
    tracer, tensor, index = call.tracer, call.arguments["self"], call.arguments["index"]
    dim = call.arg("dim", 0) % max(tensor.dim(), 1)
    labels = tracer.labels(tensor, dim) if tensor.dim() else tracer.labels(tensor)
    if not _same_for_all_units(call, index, labels, dim):
        return None
    tracer.fix(tracer.labels(index), "used as an index by 'gather'")
    axes: list[Labels | None] = []
    for d, axis in enumerate(labels.axes):
        held = axis is not None and not axis.is_uniform
        if held and (d == dim or index.shape[d] != tensor.shape[d]):
            tracer.fix(axis, "picked by 'gather' along its units")
        axes.append(axis if held and d != dim and index.shape[d] == tensor.shape[d] else None)
    return TensorLabels(tuple(axes))


def _patches(call: Call) -> Outputs:
    """Patches side by side: each channel becomes one position per place in the kernel."""
    x, out, kernel = call.labels("self"), call.outputs[0], call.arg("kernel_size")
    dim, places = out.dim() - 2, int(np.prod(kernel))
    for other, axis in enumerate(x.axes):
        if other > dim:
            call.tracer.fix(axis, "cut into patches along an axis of units")
    channel = x.units[dim]
    axes: list[Labels | None] = [None] * out.dim()
    if channel is not None:
        axes[dim] = channel.take(np.repeat(np.arange(channel.size, dtype=np.int64), places))
    return TensorLabels(tuple(axes))


def _from_patches(call: Call) -> Outputs:
    """The inverse: overlapping patches are summed, and the positions of one channel are one unit."""
    x, out, kernel = call.labels("self"), call.outputs[0], call.arg("kernel_size")
    dim, places = out.dim() - 3, int(np.prod(kernel))
    call.tracer.fix(x.axes[-1], "an axis of units is laid out as patches")
    column = x.units[dim]
    axes: list[Labels | None] = [None] * out.dim()
    if column is not None:
        rows = column.nodes.reshape(-1, places)
        sources = column.sources.reshape(-1, places)
        joint = sources[:, 0]
        for k in range(1, places):
            call.tracer.unite(rows[:, 0], rows[:, k])
            joint = call.tracer.both(joint, sources[:, k])
        axes[dim] = Labels(rows[:, 0], joint)
    return TensorLabels(tuple(axes))


HANDLERS = table(
    ("index_add index_copy scatter_add", _indexed),
    ("gather", _gather),
    ("im2col", _patches),
    ("col2im", _from_patches),
)
