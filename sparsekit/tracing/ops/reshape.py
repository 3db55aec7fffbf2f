"""Reshaping: one axis of units may be merged with others, or laid over several, such as heads and the size of a head."""

import math
from collections.abc import Sequence

import numpy as np

from sparsekit.layers.labels.joint import collapsed, reshaped, without_repeats
from sparsekit.layers.labels.values import IntArray, Joint, Labels, TensorLabels, uniform
from sparsekit.tracing.ops.call import Call, Outputs, handles

MOST_POSITIONS = 1 << 24  # bound on the work for one rearrangement
_SHIFT = 1 << 24  # packs a node and a source into one number


def pack(labels: Labels) -> IntArray:
    return (labels.nodes + 2) * _SHIFT + labels.sources


def unpack(codes: IntArray) -> Labels:
    return Labels(codes // _SHIFT - 2, codes % _SHIFT)


def one_axis(codes: IntArray) -> tuple[int, IntArray] | None:
    """The axis along which `codes` varies and the codes along it, or None if there is more than one such axis."""
    order = sorted(range(codes.ndim), key=lambda dim: -codes.shape[dim])
    for dim in order:
        line = codes[tuple(slice(None) if d == dim else slice(0, 1) for d in range(codes.ndim))]
        if (codes == line).all():
            return dim, line.reshape(-1)
    return None


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


@handles("view _unsafe_view reshape _reshape_alias _reshape_copy")
def _reshape(call: Call) -> Outputs:
    labels = call.joint_labels("self")
    before, out = tuple(call.arguments["self"].shape), call.outputs[0]
    after = tuple(out.shape)
    if 0 in before or call.func.name() == "aten::view.dtype":
        call.fix_inputs("reinterpreted memory or an empty tensor")
        return None
    runs = _groups(before, after)
    if labels.joint is not None and not _can_follow(labels, labels.joint, before, runs):
        labels = call.labels("self")
    joint = None
    if labels.joint is not None:
        joint = reshaped(labels.joint, before, after, runs)
        if len(joint.dims) > len(labels.joint.dims):
            call.tracer.split(joint.nodes.squeeze())
    axes: list[Labels | None] = [None] * len(after)
    for mine, theirs in runs:
        held = [(d, axis) for d in mine if (axis := labels.axes[d]) is not None]
        if not held:
            continue
        if all(axis.is_uniform for _, axis in held):
            for d in theirs:
                axes[d] = uniform(after[d], int(held[0][1].sources[0])) if after[d] > 1 else None
            continue
        held = [(d, axis) for d, axis in held if not axis.is_uniform]
        if labels.entry is not None:
            held.sort(key=lambda pair: int(pair[1].nodes.max()))  # the first axis of the entry itself
        for _, axis in held[1:]:
            # A cut along one of them leaves the others whole.
            reason = f"reshaped across units ({list(before)} to {list(after)})"
            call.tracer.fix(axis, reason, quiet=labels.entry is not None)
        dim, axis = held[0]
        shape, new = [before[d] for d in mine], [after[d] for d in theirs]
        if math.prod(shape) > MOST_POSITIONS:
            call.tracer.fix(axis, f"reshaped across units ({list(before)} to {list(after)})")
            continue
        codes = np.broadcast_to(pack(axis).reshape([-1 if d == dim else 1 for d in mine]), shape)
        moved = one_axis(codes.reshape(new))
        if sum(size > 1 for size in shape) > 1 or sum(size > 1 for size in new) > 1:
            nodes = unpack(codes).nodes
            call.tracer.split(without_repeats(nodes.reshape(new) if moved is None else nodes).squeeze())
        if moved is not None:
            axes[theirs[moved[0]]] = unpack(moved[1])
        elif joint is None:
            full = without_repeats(codes.reshape([after[d] if d in theirs else 1 for d in range(len(after))]))
            spread = unpack(full)
            joint = Joint(spread.nodes, spread.sources)
        else:
            call.tracer.fix(axis, f"reshaped across units ({list(before)} to {list(after)})")
    return collapsed(TensorLabels(tuple(axes), labels.entry, joint=joint))


def _can_follow(labels: TensorLabels, joint: Joint, before: Sequence[int], runs: Sequence[tuple[list[int], list[int]]]) -> bool:
    """False if a reshape lays joint labels over another axis of units, or is too large to follow."""
    size = 1
    for mine, _ in runs:
        if any(d in joint.dims for d in mine):
            size *= math.prod(before[d] for d in mine)
            if any((axis := labels.axes[d]) is not None and not axis.is_uniform for d in mine):
                return False
    return size <= MOST_POSITIONS
