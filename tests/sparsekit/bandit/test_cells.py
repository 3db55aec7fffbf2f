"""Cells: splitting and finding boxes that make up the cube, and what they face."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekit.bandit.cells import Cells, grid


def cells_with_room(count: int, axes: int) -> Cells:
    cells = Cells(grid(count, axes))
    cells.reserve(64)
    return cells


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 1), st.booleans()), max_size=40),
    st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)),
)
def test_whatever_is_split_the_cells_make_up_the_cube(moves: list[tuple[int, int, bool]], point: tuple[float, float]) -> None:
    cells = cells_with_room(2, 2)
    for which, axis, keeps_low in moves:
        cell = which % cells.size
        cells.split(cell, axis, 0.5 * float(cells.low[cell, axis] + cells.high[cell, axis]), keeps_low=keeps_low)
    size = cells.size
    assert float((cells.high[:size] - cells.low[:size]).prod(axis=1).sum()) == pytest.approx(1.0)
    found = cells.find(np.array(point))
    assert (cells.low[found] <= point).all()
    assert (point <= cells.high[found]).all()


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0.25, 0.75), st.booleans()), max_size=30))
def test_on_an_interval_each_cell_faces_its_neighbours(moves: list[tuple[int, float, bool]]) -> None:
    cells = cells_with_room(3, 1)
    for which, share, keeps_low in moves:
        cell = which % cells.size
        low, high = float(cells.low[cell, 0]), float(cells.high[cell, 0])
        cells.split(cell, 0, low + share * (high - low), keeps_low=keeps_low)
    order = np.argsort(cells.low[: cells.size, 0]).tolist()
    assert [cells.facing[cell].tolist() for cell in order] == [
        [below, above] for below, above in zip([-1, *order[:-1]], [*order[1:], -1], strict=True)
    ]
