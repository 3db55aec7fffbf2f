"""Moving joint labels: what views, permutations and new axes do to labels that vary along several axes."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from sparsekit.layers.labels.values import IntArray, Joint, Labels, TensorLabels


def without_repeats(array: IntArray, *, first: int = 0) -> IntArray:
    """The array with size 1 along every axis, from the first one on, along which it is constant."""
    for dim in range(first, array.ndim):
        line = array.take([0], dim)
        if array.shape[dim] > 1 and (array == line).all():
            array = line
    return array


def collapsed(labels: TensorLabels) -> TensorLabels:
    """The same labels; a joint that is left with one axis is that axis."""
    joint = labels.joint
    if joint is None or len(joint.dims) > 1:
        return labels
    alone = replace(labels, joint=None)
    for dim in joint.dims:
        alone = alone.with_axis(dim, Labels(joint.nodes.reshape(-1), joint.sources.reshape(-1)))
    return alone


def aligned(array: IntArray, rank: int) -> IntArray:
    """The array with new axes of size 1 in front, as in broadcasting."""
    return array.reshape((1,) * (rank - array.ndim) + array.shape)


def moved(labels: TensorLabels, axes: Sequence[Labels | None], move: Callable[[IntArray], IntArray]) -> TensorLabels:
    """Labels of a tensor whose axes were moved: `axes` are those that it has now, `move` does the same to joint labels."""
    joint = labels.joint
    return replace(labels, axes=tuple(axes), joint=joint and Joint(move(joint.nodes), move(joint.sources)))


def inserted(labels: TensorLabels, dim: int) -> TensorLabels:
    """Labels of the tensor with a new axis of size 1 before `dim`."""
    return moved(labels, (*labels.axes[:dim], None, *labels.axes[dim:]), lambda array: np.expand_dims(array, dim))


def dropped(labels: TensorLabels, gone: set[int]) -> TensorLabels:
    """Labels of the tensor without some axes, along which its joint labels do not vary."""
    left = [axis for d, axis in enumerate(labels.axes) if d not in gone]
    return moved(labels, left, lambda array: array.squeeze(tuple(gone)))


def reshaped(joint: Joint, before: Sequence[int], after: Sequence[int], runs: Sequence[tuple[list[int], list[int]]]) -> Joint:
    """Joint labels of the reshaped tensor. `runs`: the smallest runs of axes with equal products, (axes before, axes after)."""
    full, shape = list(joint.nodes.shape), [1] * len(after)
    for mine, theirs in runs:
        if any(joint.nodes.shape[d] > 1 for d in mine):
            for d in mine:
                full[d] = before[d]
            for d in theirs:
                shape[d] = after[d]
    both = np.stack([np.broadcast_to(array, full).reshape(shape) for array in (joint.nodes, joint.sources)])
    return Joint(*without_repeats(both, first=1))
