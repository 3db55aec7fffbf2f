"""The label store: connected components, sources, and what uniting does to positions without units."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sparsekit.layers.labels.store import components


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


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
