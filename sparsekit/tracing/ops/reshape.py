"""Reshaping: one axis of units may be merged with others, or laid over several, such as heads and the size of a head."""

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from sparsekit.layers.labels.values import Labels, TensorLabels, uniform, without_repeats
from sparsekit.tracing.ops.call import Call, Outputs, handles

MOST_POSITIONS = 1 << 24  # bound on the work for one rearrangement
_Runs: TypeAlias = Sequence[tuple[list[int], list[int]]]


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return smallest runs of axes with equal products: (axes before, axes after)."""
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
        joint = _laid(labels.joint, before, after, runs)
        if len(joint.dims) > len(labels.joint.dims):
            call.tracer.split(joint.nodes.squeeze())
    reason = f"reshaped across units ({list(before)} to {list(after)})"
    axes: list[Labels | None] = [None] * len(after)
    for mine, theirs in runs:
        held = [(d, axis) for d in mine if (axis := labels.axes[d]) is not None]
        if all(axis.is_uniform for _, axis in held):
            for d in theirs if held else ():
                axes[d] = uniform(after[d], int(held[0][1].sources[0])) if after[d] > 1 else None
            continue
        held = [(d, axis) for d, axis in held if not axis.is_uniform]
        if labels.entry is not None:
            held.sort(key=lambda pair: int(pair[1].nodes.max()))  # the first axis of the entry itself
        (dim, axis), *others = held
        # A cut along one of them leaves the others whole.
        call.tracer.fix([other for _, other in others], reason, quiet=labels.entry is not None)
        positions = math.prod(before[d] for d in mine)
        if axis.size == positions == max((after[d] for d in theirs), default=1):  # it stays an axis of its own
            for d in [d for d in theirs if after[d] == positions][:1]:
                axes[d] = axis
            continue
        if positions > MOST_POSITIONS:
            call.tracer.fix(axis, reason)
            continue
        column = [-1 if d == dim else 1 for d in range(len(before))]
        found = _laid(Labels(axis.nodes.reshape(column), axis.sources.reshape(column)), before, after, [(mine, theirs)])
        call.tracer.split(found.nodes.squeeze() if len(found.dims) > 1 else axis.nodes)
        if len(found.dims) < 2:
            for d in found.dims:
                axes[d] = Labels(found.nodes.reshape(-1), found.sources.reshape(-1))
        elif joint is None:
            joint = found
        else:
            call.tracer.fix(axis, reason)
    return TensorLabels(tuple(axes), labels.entry, joint=joint).collapsed()


def _laid(labels: Labels, before: Sequence[int], after: Sequence[int], runs: _Runs) -> Labels:
    """Labels of the rank of a tensor after it was reshaped along some runs of axes."""
    full, shape = list(labels.nodes.shape), [1] * len(after)
    for mine, theirs in runs:
        if any(labels.nodes.shape[d] > 1 for d in mine):
            for d in mine:
                full[d] = before[d]
            for d in theirs:
                shape[d] = after[d]
    both = np.stack([np.broadcast_to(array, full).reshape(shape) for array in (labels.nodes, labels.sources)])
    return Labels(*without_repeats(both, first=1))


def _can_follow(labels: TensorLabels, joint: Labels, before: Sequence[int], runs: _Runs) -> bool:
    """Return false if a reshape lays joint labels over another axis of units, or is too large to follow."""
    size = 1
    for mine, _ in runs:
        if any(d in joint.dims for d in mine):
            size *= math.prod(before[d] for d in mine)
            if any((axis := labels.axes[d]) is not None and not axis.is_uniform for d in mine):
                return False
    return size <= MOST_POSITIONS
