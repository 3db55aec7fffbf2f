"""Operators that rearrange one tensor: views, permutations, slices, splits and every other movement of values."""

import itertools
import math
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


@handles("as_strided")
def _restride(call: Call) -> Outputs:
    """Return other strides for axes of one position, as the pooling of channels-last maps writes in place; all else is not
    known.
    """
    tensor, labels = call.out, call.labels("self")
    wide = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    strides = [math.prod(tensor.shape[dim + 1 :]) for dim in wide]
    if (
        call.arg("storage_offset", 0) != 0
        or strides != [tensor.stride(dim) for dim in wide]
        or len(labels.axes) != tensor.dim()
        or any(axis is not None and axis.size != tensor.shape[dim] for dim, axis in enumerate(labels.axes))
    ):
        call.fix_inputs("read in strides of its own by 'as_strided'")
        return None
    return labels


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


def _expanded(call: Call, labels: TensorLabels, before: Sequence[int], after: Sequence[int]) -> TensorLabels:
    """Labels of a tensor of the shape `before` that is repeated to the shape `after`."""
    new = len(after) - len(before)
    axes: list[Labels | None] = [*constant(after[:new])]
    for axis, own, size in zip(labels.axes, before, after[new:], strict=True):
        if own == 1 and size > 1:
            call.tracer.fix(axis, "a single unit is expanded")
            axis = uniform(size)
        axes.append(axis)
    return labels.moved(axes, lambda array: aligned(array, len(after)))


@handles("expand")
def _expand(call: Call) -> Outputs:
    return _expanded(call, call.joint_labels("self"), call.arguments["self"].shape, call.out.shape)


@handles("copy")
def _copy(call: Call) -> Outputs:
    return _expanded(call, call.labels("src").computed(), call.arguments["src"].shape, call.arguments["self"].shape)


def _cut(call: Call, labels: TensorLabels, dim: int, parts: Sequence[range], reason: str) -> list[TensorLabels]:
    """Labels of parts of a tensor along an axis: parts of one size lose the same positions, others keep them."""
    whole = call.arguments["self"].shape[dim]
    if all(len(part) == whole for part in parts):
        return [labels] * len(parts)
    labels = call.tracer.tie(labels, dim)
    axis, length = labels.axes[dim], len(parts[0])
    if axis is None:
        return [labels] * len(parts)
    if not axis.is_uniform:
        even = length and all(len(part) == length and part.step == 1 and part.start % length == 0 for part in parts)
        if even and whole % length == 0:
            call.tracer.unite_rows(axis.nodes.reshape(-1, length))
        else:
            call.tracer.fix(axis, reason)
    return [labels.with_axis(dim, axis.take(slice(part.start, part.stop, part.step))) for part in parts]


@handles("slice")
def _slice(call: Call) -> Outputs:
    labels, dim = call.joint_labels("self"), call.dim()
    whole = call.arguments["self"].shape[dim]
    part = range(whole)[call.arg("start") : call.arg("end") : call.arg("step", 1)]
    if labels.parts is not None and len(part) < whole:
        return _sliced_layers(call, labels.parts[part.start : part.stop : part.step] if dim == 0 else ())
    return _cut(call, labels, dim, [part], "sliced at fixed positions")[0]


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
    dim = call.dim()
    sizes = [part.shape[dim] for part in call.outputs]
    parts = [range(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
    return _cut(call, call.joint_labels("self"), dim, parts, f"split into fixed sizes {sizes}")


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
    """Return any other rearrangement of one tensor: run it on the positions of each axis of units and see where they went."""
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
    """Return only equal parts can be shuffled again, so every part loses the same positions."""
    labels, groups = call.labels("self"), int(call.arguments["groups"])
    axis = labels.units[1]
    if axis is not None:
        call.tracer.unite_rows(axis.nodes.reshape(groups, -1))
    return _moved(call)


def _one_axis(call: Call, axis: Labels, positions: IntArray) -> tuple[int, Labels] | None:
    """Return the axis of the result along which units differ, and its labels; None if there is no such axis.

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
