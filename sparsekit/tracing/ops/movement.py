"""Operators that rearrange one tensor. Each is run on position numbers, which shows where each unit moves."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsekit.labels.facts import Count
from sparsekit.labels.numbers import Given, Number
from sparsekit.labels.values import IntArray, Labels, TensorLabels, aligned, constant, uniform, without_repeats
from sparsekit.tracing.ops.call import MOST_POSITIONS, Call, Outputs, handles, tensors_of

_BY_NUMBER = frozenset({"roll", "index_select", "index"})  # address by number, so a removed unit shifts the rest
_SINGLE = {
    "unbind": "single units are taken apart",
    "view_as_complex": "single units are taken apart",
    "select": "a single unit is selected by its position",
}
_RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy"})


@handles("clone detach alias contiguous lift_fresh _to_copy lift view_as positive")
def _same(call: Call) -> Outputs:
    return call.joint_labels("self input")


@handles("as_strided")
def _restride(call: Call) -> Outputs:
    """Label any strided view of a contiguous tensor, such as the frames of `stft`."""
    given, reason = call.arguments["self"], "read in strides of its own by 'as_strided'"
    if given.is_contiguous() and max(given.numel(), call.out.numel()) <= MOST_POSITIONS:
        return _moved(call, call.joint_labels("self"), reason)
    call.fix_inputs(reason)
    return None


def _run(call: Call, numbers: Tensor) -> Any:
    if call.name == "as_strided":
        start = call.arguments["self"].storage_offset()
        return numbers.contiguous().as_strided(call.out.shape, call.out.stride(), call.arg("storage_offset", start) - start)
    if call.name == "view_as_real":
        return numbers[..., None].expand(call.out.shape)
    if call.name == "view_as_complex":
        return numbers[..., 0]
    if call.name not in _RESHAPES:
        return call.func(numbers, **{name: value for name, value in call.arguments.items() if name != "self"})
    after, same = call.outputs[0].shape, 0  # the first axes that stay are most of a batch
    while same < min(len(after), numbers.dim()) and after[same] == numbers.shape[same] and numbers.stride(same) == 0:
        same += 1
    numbers = numbers[(slice(0, 1),) * same]
    shape = (*[1] * same, *after[same:])
    return numbers.reshape(shape) if numbers.numel() <= MOST_POSITIONS else numbers.view(shape)


def _numbers(call: Call, shape: Sequence[int]) -> list[IntArray] | None:
    """Return, for each output, the number of the input position that each of its positions comes from.

    Arrays have size 1 along axes on which the numbers are equal. None if there are too many positions. `shape`: shape of the
    input, with size 1 along axes whose positions share a number.
    """
    tensor, rest = call.arguments["self"], {name: value for name, value in call.arguments.items() if name != "self"}
    key = (call.func, tensor.shape, *shape, str(rest)) if len(call.tensors) == 1 else None
    if key in call.tracer.rearranged:
        return call.tracer.rearranged[key]
    copies = not call.func.is_view and call.name not in _RESHAPES
    if copies and max(t.numel() for t in (tensor, *call.outputs)) > MOST_POSITIONS:
        return None
    where = tensor.device if key is None else None
    numbers = torch.arange(math.prod(shape), device=where).reshape(shape).expand(tensor.shape)
    try:
        pieces = tensors_of((_run(call, numbers),))
    except RuntimeError:  # a view of too many positions
        return None
    found = []
    for piece in pieces:
        if piece.numel() == 0:
            piece = piece.new_zeros((1,) * piece.dim())
        line = piece[tuple(slice(0, 1 if stride == 0 else None) for stride in piece.stride())]
        found.append(without_repeats(line.cpu().numpy()))
    if key is not None:
        call.tracer.rearranged[key] = found
    return found


def _rearranged(call: Call, labels: Labels) -> list[Labels] | None:
    """Return the labels of the outputs, of the rank of each, from the input's labels; None if there are too many positions."""
    lines = _numbers(call, labels.nodes.shape)
    if lines is None:
        return None
    both = np.stack([labels.nodes.reshape(-1), labels.sources.reshape(-1)])
    return [Labels(*without_repeats(both[:, line], first=1)) for line in lines]


def _moved(call: Call, labels: TensorLabels, reason: str) -> list[TensorLabels]:
    """Return the labels of the outputs. If two axes of units are merged, all but the first prunable one become unprunable."""
    rank, shapes = len(labels.axes), [tensor.shape for tensor in call.outputs]
    spaces = [] if labels.joint is None else [labels.joint]
    units = [(dim, axis) for dim, axis in enumerate(labels.axes) if axis is not None and not axis.is_uniform]
    if labels.entry is not None:
        units.sort(key=lambda pair: int(pair[1].nodes.max()))  # the first axis of the entry itself
    if len(units) > 1:
        units.sort(key=lambda pair: call.tracer.is_fixed(pair[1]))
    spaces += [axis.at(dim, rank) for dim, axis in units]
    axes: list[list[Labels | None]] = [[None] * len(shape) for shape in shapes]
    joints: list[Labels | None] = [None] * len(shapes)
    taken: list[set[int]] = [set() for _ in shapes]
    for space in spaces:
        found = _rearranged(call, space)
        if found is None:
            call.tracer.fix(space, reason)
            continue
        for number, piece in enumerate(found):
            dims = piece.dims
            if call.name in _BY_NUMBER and not (len(dims) == 1 and piece.flat().same(space.flat())):
                call.tracer.fix(space, reason)
                continue
            if taken[number] & {*dims} or (len(dims) > 1 and joints[number] is not None):
                if labels.joint is not None:
                    return _moved(call, call.tracer.settle(labels), reason)
                call.tracer.fix(space, reason, quiet=labels.entry is not None)
                continue
            taken[number] |= {*dims}
            if call.name in _RESHAPES and dims:
                shape = shapes[number]
                call.tracer.sized(piece.nodes.squeeze(), [shape[dim] for dim in dims], dims, len(shape))
            if len(dims) > 1:
                joints[number] = piece
            elif dims:
                axes[number][dims[0]] = piece.flat()
    for dim, axis in enumerate(labels.axes):
        if axis is not None and axis.is_uniform:
            numbers = Labels(np.arange(axis.size, dtype=np.int64), axis.sources)
            for number, piece in enumerate(_rearranged(call, numbers.at(dim, rank)) or ()):
                for d in {*piece.dims} - taken[number]:
                    axes[number][d] = uniform(shapes[number][d], int(axis.sources[0]))
    return [TensorLabels(tuple(own), labels.entry, joint=joint) for own, joint in zip(axes, joints, strict=True)]


@handles(
    "permute transpose t unsqueeze squeeze view_as_real flip unfold repeat pixel_shuffle pixel_unshuffle diagonal rot90 "
    + " ".join(sorted(_RESHAPES))
)
def _rearrange(call: Call) -> Outputs:
    tensor = call.arguments["self"]
    if 0 in tensor.shape or call.func.name() == "aten::view.dtype":
        call.fix_inputs("reinterpreted memory or an empty tensor")
        return None
    reason = f"rearranged across units by {call.name!r}"
    if call.name in _RESHAPES:
        reason = f"reshaped across units ({list(tensor.shape)} to {list(call.outputs[0].shape)})"
    found = _moved(call, call.joint_labels("self"), reason)
    if call.name == "repeat":
        (made,), rank = found, tensor.dim()
        axes = list(made.axes)
        for dim, times in enumerate(call.arguments["repeats"]):
            own = tensor.shape[dim - len(axes) + rank] if dim >= len(axes) - rank else 1
            if own == 1 and times > 1:
                axes[dim] = uniform(times, numbers=call.tracer.given.held(times))
        return replace(made, axes=tuple(axes))
    return found


@handles(" ".join(sorted(_BY_NUMBER)))
def _by_number(call: Call) -> Outputs:
    tracer, tensor, reason = call.tracer, call.arguments["self"], f"rearranged by {call.name!r}"
    labels, others = call.labels("self"), {id(other): tracer.labels(other) for other in call.tensors if other is not tensor}
    for own in others.values():
        if own.entry is not None and not own.entry.is_parameter:
            tracer.fix(own, f"positions for {call.name!r}", quiet=True)
        elif own.has_units:
            call.fix_inputs(reason)
            return None
    return _moved(call, labels, f"{reason} at fixed positions")


@handles("channel_shuffle native_channel_shuffle")
def _channel_shuffle(call: Call) -> Outputs:
    """Tie the groups of channels, since only groups of equal size can be shuffled."""
    labels, groups = call.labels("self"), int(call.arguments["groups"])
    axis = labels.units[1]
    if axis is not None:
        call.tracer.unite_rows(axis.nodes.reshape(groups, -1))
    return _moved(call, labels, f"rearranged by {call.name!r}")


@handles("slice split split_with_sizes unsafe_split unsafe_split_with_sizes select unbind view_as_complex")
def _take_apart(call: Call) -> Outputs:
    """Tie parts of equal size, so that equal positions are removed. Other parts are unprunable unless their sizes follow."""
    tensor, labels = call.arguments["self"], call.joint_labels("self")
    dim = tensor.dim() - 1 if call.name == "view_as_complex" else call.dim()
    if labels.parts is not None:
        return _layers_apart(call, labels.parts, dim)
    if any(out.dim() == tensor.dim() and out.shape[dim] == tensor.shape[dim] for out in call.outputs):
        return _moved(call, labels, f"taken apart by {call.name!r}")
    labels = call.tracer.tie(labels, dim)
    axis = labels.units[dim]
    if axis is not None:
        found = _numbers(call, [axis.size if d == dim else 1 for d in range(tensor.dim())])
        parts = [part.reshape(-1) for part in found or ()]
        if call.name in _SINGLE:
            call.tracer.fix(axis, _SINGLE[call.name])
        elif not _take_parts(call, axis, parts):
            reason = "sliced at fixed positions" if call.name == "slice" else f"split into fixed sizes {[*map(len, parts)]}"
            call.tracer.fix(axis, reason)
    return _moved(call, labels, f"taken apart by {call.name!r}")


def _take_parts(call: Call, axis: Labels, parts: Sequence[IntArray]) -> bool:
    """Record which positions of an axis form a unit when these parts of it are taken; False if their places are fixed."""
    tracer, size, length = call.tracer, axis.size, parts[0].size
    given, start, stop = tracer.given.numbers, int(parts[0][0]), int(parts[0][-1]) + 1
    ends = {start, stop} - {0, size}
    follows = all(place in given or size - place in given for place in ends)
    if all(part.size == length for part in parts) and size % length == 0:
        aligned_parts = all(np.array_equal(part, part[0] // length * length + np.arange(length)) for part in parts)
        # A length that is a product, such as heads × head size, counts units. Half of the axis may be meant as a half.
        counted = 2 * length != size or any(len(given[place].factors) > 1 for place in ends & given.keys())
        if aligned_parts and not (call.name == "slice" and follows and counted):
            tracer.unite_rows(axis.nodes.reshape(-1, length))
            if (sizes := _sizes_of(tracer.given, parts)) is not None:
                _follow_sizes(call, axis, parts, sizes)
            else:
                tracer.sized(axis.nodes[:length], [length])
            return True
        step = size // length
        if step > 1 and all(np.array_equal(part, part[0] % step + step * np.arange(length)) for part in parts):
            tracer.unite_rows(axis.nodes.reshape(length, step).T)
            return True
    # Parts of several sizes: each length must follow, and so must the place where the first one starts.
    if any(not np.array_equal(part, part[0] + np.arange(part.size)) for part in parts):
        return False
    if call.name != "slice":
        sizes = _sizes_of(tracer.given, parts)
        return sizes is not None and _follow_sizes(call, axis, parts, sizes)
    for place in ends if follows else ():
        if place not in given:
            tracer.sized(axis.nodes[place:], [size - place])
        elif place == start:
            tracer.sized(axis.nodes[:start], [start])
        else:
            taken = given[stop] - given.get(start, 0)
            tracer.facts.append(Count(axis.nodes[start:stop], (taken.held if isinstance(taken, Number) else frozenset(),)))
    return follows


def _sizes_of(given: Given, parts: Sequence[IntArray]) -> tuple[int, ...] | None:
    """Return the integers of a call that are the sizes of parts, one for each in their order; None if it has none."""
    sizes = tuple(part.size for part in parts)
    starts = range(len(given.shape) - len(sizes) + 1)
    return next(
        (given.shape[start : start + len(sizes)] for start in starts if given.shape[start:][: len(sizes)] == sizes), None
    )


def _follow_sizes(call: Call, axis: Labels, parts: Sequence[IntArray], sizes: Sequence[int]) -> bool:
    """Record which integer gave the size of each part; return False if some sizes are literals."""
    tracer, total, before = call.tracer, 0, call.tracer.given
    for part, size in zip(parts, sizes, strict=True):
        tracer.given = Given.of(size)
        tracer.sized(axis.nodes[part], [part.size])
        total += size
        if isinstance(size, Number) and not size.factors and isinstance(total, Number):  # width - 4, after a part of 4
            tracer.facts.append(Count(axis.nodes[: int(total)], (total.held,)))
    tracer.given = before
    return all(isinstance(size, Number) for size in sizes)


def _layers_apart(call: Call, layers: Sequence[TensorLabels], dim: int) -> Outputs:
    """Return the labels of the last states of some layers; a single layer gives an ordinary tensor."""
    if call.name == "slice":
        part = slice(call.arg("start"), call.arg("end"), call.arg("step", 1))
        whole = call.outputs[0].shape[dim] == call.arguments["self"].shape[dim]
        layers = layers if whole else layers[part] if dim == 0 else ()
        if layers and not whole and all(layers[0].same(layer) for layer in layers):
            return TensorLabels((None, *layers[0].axes))
    elif dim == 0:
        return list(layers) if call.name == "unbind" else layers[call.arguments["index"]]
    else:
        layers = ()
    if not layers:
        call.fix_inputs("stacked states of several layers are cut across layers")
        return None
    return TensorLabels((None,) * call.out.dim(), parts=tuple(layers))


@handles("expand copy")
def _expand(call: Call) -> Outputs:
    """Label new positions as constant along their axes. The source of a copy is expanded too."""
    source = call.arguments["src"] if call.name == "copy" else call.arguments["self"]
    labels = call.labels("src").computed() if call.name == "copy" else call.joint_labels("self")
    before, after = source.shape, call.arguments["self"].shape if call.name == "copy" else call.out.shape
    new = len(after) - len(before)
    axes: list[Labels | None] = [*constant(after[:new])]
    for axis, own, size in zip(labels.axes, before, after[new:], strict=True):
        if own == 1 and size > 1:
            call.tracer.fix(axis, "a single unit is expanded")
            axis = uniform(size, numbers=call.tracer.given.held(size))
        axes.append(axis)
    joint = labels.joint and Labels(aligned(labels.joint.nodes, len(after)), aligned(labels.joint.sources, len(after)))
    return replace(labels, axes=tuple(axes), joint=joint)
