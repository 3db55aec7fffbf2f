"""The label store: connected components, sources, and what uniting does to positions without units."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekit.labels.store import Cause, LabelStore, components
from sparsekit.labels.tracer import Tracer
from sparsekit.labels.values import ALWAYS_ZERO, NOT_ZERO, Labels, uniform

LOUD = Cause("layer", "because", False)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_components_take_the_lowest_node_of_each() -> None:
    assert components(6, [(ints(5, 2), ints(3, 0)), (ints(3), ints(1))]).tolist() == [0, 1, 0, 1, 4, 1]


def test_components_without_edges_are_single_nodes() -> None:
    assert components(3, []).tolist() == [0, 1, 2]


@given(st.lists(st.tuples(st.integers(0, 29), st.integers(0, 29)), max_size=60))
def test_components_equal_those_of_a_plain_union_find(edges: list[tuple[int, int]]) -> None:
    parent = list(range(30))

    def find(x: int) -> int:
        while parent[x] != x:
            x = parent[x]
        return x

    for a, b in edges:
        low, high = sorted((find(a), find(b)))
        parent[high] = low
    united = [(ints(*(a for a, _ in edges)), ints(*(b for _, b in edges)))] if edges else []
    assert components(30, united).tolist() == [find(x) for x in range(30)]


def test_every_axis_longer_than_one_gets_fresh_nodes() -> None:
    store = LabelStore()
    weight = store.add_entry(["a.weight"], (3, 1, 2), is_parameter=True)
    bias = store.add_entry(["a.bias"], (3,), is_parameter=True)
    assert weight.first == (0, None, 3)
    assert bias.first == (5,)
    assert store.nodes == 8
    labels = store.labels_of(weight)
    assert labels.axes[1] is None
    assert labels.axes[2] is not None
    assert labels.axes[2].nodes.tolist() == [3, 4]


def test_a_buffer_is_never_a_source() -> None:
    store = LabelStore()
    buffer = store.add_entry(["mean"], (3,), is_parameter=False)
    axis = store.labels_of(buffer).axes[0]
    assert axis is not None
    assert set(axis.sources.tolist()) == {NOT_ZERO}


def test_a_sum_is_zero_only_where_both_terms_are() -> None:
    store = LabelStore()
    a, b = store.source({(0, 0)}), store.source({(1, 0)})
    both = store.both(ints(a, a, NOT_ZERO, ALWAYS_ZERO), ints(b, NOT_ZERO, b, b))
    assert store.gated_by(int(both[0])) == {(0, 0), (1, 0)}
    assert both[1:].tolist() == [NOT_ZERO, NOT_ZERO, b]


def test_uniting_with_positions_without_units_fixes() -> None:
    store = LabelStore(nodes=3)
    Tracer(store).unite(ints(0, 1, -1), ints(-1, 2, -1))
    assert [nodes.tolist() for nodes, _ in store.fixed] == [[0]]
    assert [(a.tolist(), b.tolist()) for a, b in store.united] == [([1], [2])]


@pytest.mark.parametrize("size", [1, 4])
def test_uniform_axes_fit_anything(size: int) -> None:
    assert uniform(size).is_uniform
    assert not Labels(np.arange(size), np.zeros(size, dtype=np.int64)).is_uniform
