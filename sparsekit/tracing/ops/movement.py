"""Operators that rearrange one tensor: views, permutations, slices, splits and every other movement of values."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sparsekit.graph.index import along
from sparsekit.layers.labels.values import IntArray, Labels, TensorLabels, aligned, constant, uniform, without_repeats
from sparsekit.tracing.ops.call import Call, Outputs, handles
from sparsekit.tracing.ops.reshape import MOST_POSITIONS

_POSITIONS = frozenset({"roll", "index_select", "index"})  # say by number what goes where, so a removed unit shifts the rest


@handles("clone detach alias contiguous lift_fresh _to_copy lift view_as positive")
def _same(call: Call) -> Outputs:
    return call.joint_labels("self input")


@handles("permute transpose t")
def _permute(call: Call) -> Outputs:
    labels = call.joint_labels("self")
    rank = len(labels.axes)
    order = list(range(rank))
    if call.name == "permute":
        order = [d % rank for d in call.arg("dims")]
    elif call.name == "t":
        order.reverse()
    else:
        a, b = call.arg("dim0") % rank, call.arg("dim1") % rank
        order[a], order[b] = b, a
    return labels.moved([labels.axes[d] for d in order], lambda array: array.transpose(order))


@handles("unsqueeze")
def _unsqueeze(call: Call) -> Outputs:
    labels = call.joint_labels("self")
    return labels.inserted(call.arg("dim", 0) % (len(labels.axes) + 1))


@handles("squeeze")
def _squeeze(call: Call) -> Outputs:
    labels, tensor = call.joint_labels("self"), call.arguments["self"]
    given = call.arg("dim")
    chosen = range(tensor.dim()) if given is None else [given] if isinstance(given, int) else given
    gone = {d % max(tensor.dim(), 1) for d in chosen if tensor.dim() and tensor.shape[d] == 1}
    call.tracer.fix([labels.axes[d] for d in gone], "an axis of units is squeezed away")
    return labels.dropped(gone)


@handles("expand")
def _expand(call: Call) -> Outputs:
    labels, tensor, out = call.joint_labels("self"), call.arguments["self"], call.outputs[0]
    new = out.dim() - tensor.dim()
    axes: list[Labels | None] = [*constant(out.shape[:new])]
    for d in range(tensor.dim()):
        axis, size = labels.axes[d], out.shape[new + d]
        if tensor.shape[d] == 1 and size > 1:
            call.tracer.fix(axis, "a single unit is expanded")
            axis = uniform(size)
        axes.append(axis)
    return labels.moved(axes, lambda array: aligned(array, out.dim()))


@handles("slice")
def _slice(call: Call) -> Outputs:
    labels, tensor = call.joint_labels("self"), call.arguments["self"]
    dim = call.dim()
    start, stop, step = slice(call.arg("start"), call.arg("end"), call.arg("step", 1)).indices(tensor.shape[dim])
    length = len(range(start, stop, step))
    if length == tensor.shape[dim]:
        return labels
    if labels.parts is not None:
        return _sliced_layers(call, labels.parts[start:stop:step] if dim == 0 else ())
    labels = call.tracer.tie(labels, dim)
    axis = labels.axes[dim]
    if axis is None:
        return labels
    if not axis.is_uniform:
        if step == 1 and length and axis.size % length == 0 and start % length == 0:
            call.tracer.unite_rows(axis.nodes.reshape(-1, length))  # parts of one size lose the same positions
        else:
            call.tracer.fix(axis, "sliced at fixed positions")
    return labels.with_axis(dim, axis.take(slice(start, stop, step)))


def _sliced_layers(call: Call, parts: Sequence[TensorLabels]) -> TensorLabels | None:
    """Labels of the last states of some layers; those of one layer alone are an ordinary tensor."""
    if not parts:
        call.fix_inputs("stacked states of several layers are cut across layers")
        return None
    if all(parts[0].same(part) for part in parts):
        return TensorLabels((None, *parts[0].axes))
    return TensorLabels((None,) * call.outputs[0].dim(), parts=tuple(parts))


@handles("split split_with_sizes unsafe_split unsafe_split_with_sizes")
def _split(call: Call) -> Outputs:
    labels, dim = call.joint_labels("self"), call.dim()
    if len(call.outputs) > 1:
        labels = call.tracer.tie(labels, dim)
    axis = labels.axes[dim]
    if axis is None:
        return [labels] * len(call.outputs)
    sizes = [part.shape[dim] for part in call.outputs]
    if not axis.is_uniform and len(sizes) > 1:
        if len(set(sizes)) == 1:
            call.tracer.unite_rows(axis.nodes.reshape(-1, sizes[0]))
        else:
            call.tracer.fix(axis, f"split into fixed sizes {sizes}")
    ends = np.cumsum(sizes).tolist()
    return [labels.with_axis(dim, axis.take(slice(end - size, end))) for size, end in zip(sizes, ends, strict=True)]


@handles("select unbind")
def _take_apart(call: Call) -> Outputs:
    dim, chosen = call.dim(), call.arg("index")
    labels = call.tracer.tie(call.joint_labels("self"), dim)
    if labels.parts is not None:
        if dim == 0:
            return list(labels.parts) if chosen is None else labels.parts[chosen]
        call.fix_inputs("stacked states of several layers are cut across layers")
        return None
    call.tracer.fix(
        labels.axes[dim], "single units are taken apart" if chosen is None else "a single unit is selected by its position"
    )
    return [labels.dropped({dim})] * len(call.outputs)


@handles("view_as_complex")
def _as_complex(call: Call) -> Outputs:
    labels = call.labels("self", -1)
    last = len(labels.axes) - 1
    call.tracer.fix(labels.axes[last], "single units are taken apart")
    return labels.dropped({last})


@handles("view_as_real")
def _as_real(call: Call) -> Outputs:
    labels = call.joint_labels("self")
    return labels.inserted(len(labels.axes))


@handles("flip roll index_select index unfold repeat pixel_shuffle pixel_unshuffle diagonal rot90")
def _moved(call: Call) -> Outputs:
    """Any other rearrangement of one tensor: run it on the positions of each axis of units and see where they went."""
    labels, tensor = call.labels("self"), call.arguments["self"]
    others = []
    for other in call.tensors:
        own = call.tracer.labels(other)
        if other is not tensor and own.entry is not None and not own.entry.is_parameter:
            call.tracer.fix(own, f"positions for {call.name!r}", quiet=True)
        elif other is not tensor and own.has_units:
            others.append(other)
    if others or tensor.numel() > MOST_POSITIONS or any(o.numel() > MOST_POSITIONS for o in call.outputs):
        call.fix_inputs(f"rearranged by {call.name!r}")
        return [None] * len(call.outputs)
    axes: list[list[Labels | None]] = [[None] * out.dim() for out in call.outputs]
    rest = {name: value for name, value in call.arguments.items() if name != "self"}
    for dim, axis in enumerate(labels.units):
        if axis is None:
            continue
        positions = along(torch.arange(axis.size, device=tensor.device), dim, tensor.dim())
        found = call.func(positions.expand(tensor.shape), **rest)
        for number, piece in enumerate([found] if isinstance(found, Tensor) else found):
            if piece.numel() == 0:
                call.tracer.fix(axis, f"rearranged by {call.name!r}")
                continue
            line = _one_axis(call, axis, piece.cpu().numpy())
            if line is None or axes[number][line[0]] is not None:
                call.tracer.fix(axis, f"rearranged across units by {call.name!r}")
            elif call.name in _POSITIONS and not line[1].same(axis):
                call.tracer.fix(axis, f"rearranged by {call.name!r} at fixed positions")
            else:
                axes[number][line[0]] = line[1]
    return [TensorLabels(tuple(a), labels.entry) for a in axes]


@handles("channel_shuffle native_channel_shuffle")
def _channel_shuffle(call: Call) -> Outputs:
    """Only equal parts can be shuffled again, so every part loses the same positions."""
    labels, groups = call.labels("self"), int(call.arguments["groups"])
    axis = labels.units[1]
    if axis is not None:
        call.tracer.unite_rows(axis.nodes.reshape(groups, -1))
    return _moved(call)


def _one_axis(call: Call, axis: Labels, positions: IntArray) -> tuple[int, Labels] | None:
    """The axis of the result along which units differ, and its labels; None where there is no such axis.

    Args:
        call: The rearrangement.
        axis: The units before it.
        positions: Of each element of the result, where it was along `axis`.
    """
    line = without_repeats(positions)
    dims = [dim for dim, size in enumerate(line.shape) if size > 1]
    if len(dims) == 1:
        return dims[0], axis.take(line.reshape(-1))
    # Or that whose positions draw on disjoint sets of units (pixel shuffle: r² channels give one); those become one.
    for dim in range(positions.ndim):
        rows = np.moveaxis(positions, dim, 0).reshape(positions.shape[dim], -1)
        sets = [np.unique(row) for row in rows]
        sizes = {s.size for s in sets}
        if len(sets) < 2 or len(sizes) > 1 or np.unique(np.concatenate(sets)).size != sum(s.size for s in sets):
            continue
        first, *others = (axis.take(column) for column in np.stack(sets, axis=1))
        for other in others:
            call.tracer.unite(first.nodes, other.nodes)
            if (first.sources != other.sources).any():
                call.tracer.fix(first, f"rearranged across units by {call.name!r}")
        return dim, first
    return None
