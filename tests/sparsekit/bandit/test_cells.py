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


def test_a_grid_cuts_the_first_axes_first() -> None:
    assert grid(2, 1) == [([0.0], [0.5]), ([0.5], [1.0])]
    assert len(grid(5, 2)) == 6
    assert grid(2, 2) == [([0.0, 0.0], [0.5, 1.0]), ([0.5, 0.0], [1.0, 1.0])]


def test_a_split_gives_the_new_cell_the_other_side_and_makes_both_deeper() -> None:
    cells = cells_with_room(1, 2)
    assert cells.split(0, 1, 0.25, keeps_low=True) == 1
    assert cells.high[0].tolist() == [1.0, 0.25]
    assert cells.low[1].tolist() == [0.0, 0.25]
    assert (cells.depth[:2].tolist(), cells.born[:2].tolist(), cells.parent[:2].tolist()) == ([1, 1], [0, 1], [0, 0])


def test_halves_cuts_the_longest_axis() -> None:
    cells = cells_with_room(1, 2)
    assert cells.halves(0) == (0, 0.5)
    cells.split(0, 0, 0.5, keeps_low=True)
    assert cells.halves(0) == (1, 0.5)


def test_a_cell_too_narrow_is_not_halved() -> None:
    assert Cells([([0.0], [1e-8]), ([1e-8], [1.0])]).halves(0) is None


def test_the_first_cells_of_a_grid_face_their_neighbours() -> None:
    assert Cells(grid(3, 1)).facing.tolist() == [[-1, 1], [0, 2], [1, -1]]
    # Below and above on the first axis, then on the second.
    assert Cells(grid(4, 2)).facing.tolist() == [[-1, 2, -1, 1], [-1, 3, 0, -1], [0, -1, -1, 3], [1, -1, 2, -1]]


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
