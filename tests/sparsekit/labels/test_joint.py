"""Joint labels: one axis of units, laid over several, moved along with its tensor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekit.labels.joint import collapsed, dropped, inserted, permuted, reshaped, without_repeats
from sparsekit.labels.values import Joint, TensorLabels


def labels(*shape: int) -> TensorLabels:
    """Of a tensor of two batch entries and the given axes, which number their positions."""
    nodes = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(1, *shape)
    return TensorLabels((None,) * (1 + len(shape)), joint=Joint(nodes, np.zeros_like(nodes)))


def test_the_axes_of_a_joint_are_those_along_which_units_differ() -> None:
    joint = labels(2, 1, 3).joint
    assert joint is not None
    assert joint.dims == (1, 3)


def test_moved_labels_lie_where_the_values_lie() -> None:
    start = labels(2, 3)
    moved = permuted(inserted(start, 1), (3, 1, 2, 0))
    assert moved.joint is not None
    assert moved.joint.nodes.shape == (3, 1, 2, 1)
    assert moved.joint.nodes[:, 0, :, 0].tolist() == [[0, 3], [1, 4], [2, 5]]
    back = dropped(moved, {1})
    assert back.joint is not None
    assert back.joint.nodes.shape == (3, 2, 1)
    assert len(back.axes) == 3


def test_a_joint_of_one_axis_is_that_axis() -> None:
    alone = collapsed(labels(1, 3))
    assert alone.joint is None
    assert alone.axes[1] is None
    assert alone.axes[2] is not None
    assert alone.axes[2].nodes.tolist() == [0, 1, 2]
    assert collapsed(labels(2, 3)).joint is not None


def test_axes_of_equal_values_shrink_to_one_position() -> None:
    assert without_repeats(np.array([[1, 2], [1, 2]])).tolist() == [[1, 2]]
    assert without_repeats(np.array([[1, 1], [2, 2]])).tolist() == [[1], [2]]
    assert without_repeats(np.array([[1, 2], [2, 1]])).tolist() == [[1, 2], [2, 1]]


@pytest.mark.parametrize(
    ("after", "runs", "nodes"),
    [
        ((2, 6), [([0], [0]), ([1, 2], [1])], [[0, 1, 2, 3, 4, 5]]),
        ((4, 3), [([0, 1], [0]), ([2], [1])], [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]]),
        ((2, 2, 3, 1), [([0], [0]), ([1], [1]), ([2], [2, 3])], [[[[0], [1], [2]], [[3], [4], [5]]]]),
    ],
)
def test_reshaped_labels_lie_where_the_values_lie(after: tuple[int, ...], runs: list, nodes: list) -> None:
    start = labels(2, 3).joint
    assert start is not None
    assert reshaped(start, (2, 2, 3), after, runs).nodes.tolist() == nodes


@given(st.permutations([0, 1, 2, 3]))
def test_a_permutation_is_undone_by_its_inverse(order: list[int]) -> None:
    start = labels(2, 3, 4)
    back = permuted(permuted(start, order), np.argsort(order).tolist())
    assert back.same(start)
