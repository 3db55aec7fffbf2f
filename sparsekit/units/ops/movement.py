"""Operators that rearrange one tensor: views, permutations, slices, splits and every other movement of values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sparsekit.units.labels import IntArray, Labels, TensorLabels, uniform
from sparsekit.units.tracer import Call, Handler, Outputs

__all__ = ["HANDLERS", "table"]

_MOST_POSITIONS = 1 << 24  # bound on the work for one rearrangement
_SHIFT = 1 << 24  # packs a node and a source into one number

_POSITIONS = frozenset({"roll", "index_select", "index"})  # say by number what goes where, so a removed unit shifts the rest


def table(*pairs: tuple[str, Handler]) -> dict[str, Handler]:
    """Operator name → handler, from (names separated by spaces, handler)."""
    return {name: handler for names, handler in pairs for name in names.split()}


def _pack(labels: Labels) -> IntArray:
    return (labels.nodes + 2) * _SHIFT + labels.sources


def _unpack(codes: IntArray) -> Labels:
    return Labels(codes // _SHIFT - 2, codes % _SHIFT)


def _one_axis(codes: IntArray) -> tuple[int, IntArray] | None:
    """The axis along which `codes` varies and the codes along it, or None if there is more than one such axis."""
    order = sorted(range(codes.ndim), key=lambda dim: -codes.shape[dim])
    for dim in order:
        line = codes[tuple(slice(None) if d == dim else slice(0, 1) for d in range(codes.ndim))]
        if (codes == line).all():
            return dim, line.reshape(-1)
    return None


def _same(call: Call) -> Outputs:
    return call.labels("self") or call.labels("input")


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of axes with equal products: (axes before, axes after)."""
    runs: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        mine, theirs = [], []
        left = right = 1
        if i < len(before):
            left, mine, i = before[i], [i], i + 1
        if j < len(after) and (not mine or left != 1 or after[j] == 1):
            right, theirs, j = after[j], [j], j + 1
        while left != right:
            if left < right:
                left, mine, i = left * before[i], [*mine, i], i + 1
            else:
                right, theirs, j = right * after[j], [*theirs, j], j + 1
        runs.append((mine, theirs))
    return runs


def _reshape(call: Call) -> Outputs:
    labels = call.labels("self")
    before, out = tuple(call.arguments["self"].shape), call.outputs[0]
    after = tuple(out.shape)
    if labels is None:
        return None
    if 0 in before or call.func.name() == "aten::view.dtype":
        call.freeze_inputs("reinterpreted memory or an empty tensor")
        return None
    axes: list[Labels | None] = [None] * len(after)
    for mine, theirs in _groups(before, after):
        labelled = [(d, labels.axes[d]) for d in mine]
        held = [(d, axis) for d, axis in labelled if axis is not None]
        if not held:
            continue
        if all(axis.is_uniform for _, axis in held):
            if len(held) == sum(before[d] > 1 for d in mine):
                for d in theirs:
                    axes[d] = uniform(after[d], int(held[0][1].sources[0])) if after[d] > 1 else None
            continue
        held = [(d, axis) for d, axis in held if not axis.is_uniform]
        shape = [before[d] for d in mine]
        moved = None
        if len(held) == 1 and math.prod(shape) <= _MOST_POSITIONS:
            dim, axis = held[0]
            codes = _pack(axis).reshape([-1 if d == dim else 1 for d in mine])
            moved = _one_axis(np.broadcast_to(codes, shape).reshape([after[d] for d in theirs]))
        if moved is None:
            for _, axis in held:
                call.tracer.freeze(axis, f"reshaped across units ({list(before)} to {list(after)})")
            continue
        axes[theirs[moved[0]]] = _unpack(moved[1])
    return TensorLabels(tuple(axes), labels.entry)


def _pick(call: Call, order: Sequence[int]) -> Outputs:
    labels = call.labels("self")
    return None if labels is None else TensorLabels(tuple(labels.axes[d] for d in order), labels.entry)


def _permute(call: Call) -> Outputs:
    rank = call.arguments["self"].dim()
    return _pick(call, [d % rank for d in call.arg("dims")])


def _transpose(call: Call) -> Outputs:
    rank = call.arguments["self"].dim()
    order = list(range(rank))
    if call.name == "t":
        order.reverse()
    else:
        a, b = call.arg("dim0") % rank, call.arg("dim1") % rank
        order[a], order[b] = b, a
    return _pick(call, order)


def _unsqueeze(call: Call) -> Outputs:
    labels = call.labels("self")
    if labels is None:
        return None
    dim = call.arg("dim", 0) % (len(labels.axes) + 1)
    return TensorLabels((*labels.axes[:dim], None, *labels.axes[dim:]), labels.entry)


def _squeeze(call: Call) -> Outputs:
    labels, tensor = call.labels("self"), call.arguments["self"]
    if labels is None:
        return None
    given = call.arg("dim")
    chosen = range(tensor.dim()) if given is None else [given] if isinstance(given, int) else given
    gone = {d % max(tensor.dim(), 1) for d in chosen if tensor.dim() and tensor.shape[d] == 1}
    for d in gone:
        call.tracer.freeze(labels.axes[d], "an axis of units is squeezed away")
    return TensorLabels(tuple(axis for d, axis in enumerate(labels.axes) if d not in gone), labels.entry)


def _expand(call: Call) -> Outputs:
    labels, tensor, out = call.labels("self"), call.arguments["self"], call.outputs[0]
    if labels is None:
        return None
    new = out.dim() - tensor.dim()
    axes: list[Labels | None] = [uniform(size) if size > 1 else None for size in out.shape[:new]]
    for d in range(tensor.dim()):
        axis, size = labels.axes[d], out.shape[new + d]
        if tensor.shape[d] == 1 and size > 1:
            call.tracer.freeze(axis, "a single unit is expanded")
            axis = uniform(size)
        axes.append(axis)
    return TensorLabels(tuple(axes), labels.entry)


def _tie_parts(call: Call, labels: Labels, size: int) -> None:
    """Equal parts of an axis must lose the same positions, or the parts would differ in size."""
    parts = labels.nodes.reshape(-1, size)
    for part in parts[1:]:
        call.tracer.unite(parts[0], part)


def _slice(call: Call) -> Outputs:
    labels, tensor = call.labels("self"), call.arguments["self"]
    dim: int = call.arg("dim", 0) % tensor.dim()
    axis = labels.axes[dim] if labels is not None else None
    if labels is None or axis is None:
        return labels
    start, stop, step = slice(call.arg("start"), call.arg("end"), call.arg("step", 1)).indices(axis.size)
    length = len(range(start, stop, step))
    if length == axis.size:
        return labels
    if not axis.is_uniform:
        if step == 1 and length and axis.size % length == 0 and start % length == 0:
            _tie_parts(call, axis, length)
        else:
            call.tracer.freeze(axis, "sliced at fixed positions")
    return labels.with_axis(dim, axis.take(slice(start, stop, step)))


def _split(call: Call) -> Outputs:
    labels, tensor = call.labels("self"), call.arguments["self"]
    dim = call.arg("dim", 0) % tensor.dim()
    if labels is None or labels.axes[dim] is None:
        return [labels] * len(call.outputs)
    axis = labels.axes[dim]
    assert axis is not None
    sizes = [part.shape[dim] for part in call.outputs]
    if not axis.is_uniform and len(sizes) > 1:
        if len(set(sizes)) == 1:
            _tie_parts(call, axis, sizes[0])
        else:
            call.tracer.freeze(axis, f"split into fixed sizes {sizes}")
    ends = np.cumsum(sizes).tolist()
    return [labels.with_axis(dim, axis.take(slice(end - size, end))) for size, end in zip(sizes, ends, strict=True)]


def _select(call: Call) -> Outputs:
    labels, tensor = call.labels("self"), call.arguments["self"]
    if labels is None:
        return None
    dim = call.arg("dim", 0) % tensor.dim()
    if labels.parts is not None:
        if dim == 0:
            chosen: TensorLabels = labels.parts[call.arg("index") % tensor.shape[0]]
            return chosen
        call.freeze_inputs("stacked states of several layers are cut across layers")
        return None
    axis = labels.axes[dim]
    if axis is not None and not axis.is_uniform:
        call.tracer.freeze(axis, "a single unit is selected by its position")
    return TensorLabels(labels.axes[:dim] + labels.axes[dim + 1 :], labels.entry)


def _unbind(call: Call) -> Outputs:
    labels, tensor = call.labels("self"), call.arguments["self"]
    if labels is None:
        return None
    dim = call.arg("dim", 0) % tensor.dim()
    if labels.parts is not None:
        if dim == 0:
            return list(labels.parts)
        call.freeze_inputs("stacked states of several layers are cut across layers")
        return None
    axis = labels.axes[dim]
    if axis is not None and not axis.is_uniform:
        call.tracer.freeze(axis, "single units are taken apart")
    rest = TensorLabels(labels.axes[:dim] + labels.axes[dim + 1 :], labels.entry)
    return [rest] * len(call.outputs)


def _moved(call: Call) -> Outputs:
    """Any other rearrangement of one tensor: run it on the labels themselves and see where they went."""
    labels, tensor = call.labels("self"), call.arguments["self"]
    others = [t for t in call.tensors if t is not tensor and call.tracer.labels(t).has_units]
    if labels is None or others or tensor.numel() > _MOST_POSITIONS or any(o.numel() > _MOST_POSITIONS for o in call.outputs):
        call.freeze_inputs(f"rearranged by {call.name!r}")
        return [None] * len(call.outputs)
    axes: list[list[Labels | None]] = [[None] * out.dim() for out in call.outputs]
    rest = {name: value for name, value in call.arguments.items() if name != "self"}
    for dim, axis in enumerate(labels.axes):
        if axis is None or axis.is_uniform:
            continue
        codes = torch.from_numpy(_pack(axis)).to(tensor.device).view([-1 if d == dim else 1 for d in range(tensor.dim())])
        moved = call.func(codes.expand(tensor.shape), **rest)
        pieces = [moved] if isinstance(moved, Tensor) else list(moved)
        for number, piece in enumerate(pieces):
            if piece.numel() == 0:
                call.tracer.freeze(axis, f"rearranged by {call.name!r}")
                continue
            array = piece.cpu().numpy()
            found = _one_axis(array)
            found = _tied_axis(call, array) if found is None else found
            if found is not None and call.name in _POSITIONS and not np.array_equal(found[1], _pack(axis)):
                call.tracer.freeze(axis, f"rearranged by {call.name!r} at fixed positions")
                continue
            if found is None or axes[number][found[0]] is not None:
                call.tracer.freeze(axis, f"rearranged across units by {call.name!r}")
                continue
            axes[number][found[0]] = _unpack(found[1])
    return [TensorLabels(tuple(a), labels.entry) for a in axes]


def _tied_axis(call: Call, codes: IntArray) -> tuple[int, IntArray] | None:
    """The axis whose positions draw on disjoint sets of units (pixel shuffle: r² channels give one); those become one."""
    for dim in range(codes.ndim):
        rows = np.moveaxis(codes, dim, 0).reshape(codes.shape[dim], -1)
        sets = [np.unique(row) for row in rows]
        if (
            len(sets) < 2
            or len({s.size for s in sets}) > 1
            or np.unique(np.concatenate(sets)).size != sum(s.size for s in sets)
        ):
            continue
        for position in range(1, sets[0].size):
            first, other = (_unpack(np.array([s[k] for s in sets])) for k in (0, position))
            call.tracer.unite(first.nodes, other.nodes)
            if (first.sources != other.sources).any():
                call.tracer.freeze(first, f"rearranged across units by {call.name!r}")
        return dim, np.array([s[0] for s in sets], dtype=np.int64)
    return None


HANDLERS = table(
    ("clone detach alias contiguous lift_fresh _to_copy lift view_as positive", _same),
    ("view _unsafe_view reshape _reshape_alias _reshape_copy", _reshape),
    ("permute", _permute),
    ("transpose t", _transpose),
    ("unsqueeze", _unsqueeze),
    ("squeeze", _squeeze),
    ("expand", _expand),
    ("slice", _slice),
    ("split split_with_sizes unsafe_split unsafe_split_with_sizes", _split),
    ("select", _select),
    ("unbind", _unbind),
    ("flip roll index_select index unfold repeat pixel_shuffle pixel_unshuffle channel_shuffle", _moved),
    ("native_channel_shuffle diagonal rot90", _moved),
)
