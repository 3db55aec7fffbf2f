"""Cells: splitting, finding and joining boxes that make up the cube."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekit.bandit.cells import Cells, grid
from sparsekit.errors import InvalidValueError


def volume(cells: Cells) -> float:
    return float((cells.high[: cells.size] - cells.low[: cells.size]).prod(axis=1).sum())


def test_a_grid_cuts_the_first_axes_first() -> None:
    assert grid(2, 1) == [([0.0], [0.5]), ([0.5], [1.0])]
    assert len(grid(5, 2)) == 6
    assert grid(2, 2) == [([0.0, 0.0], [0.5, 1.0]), ([0.5, 0.0], [1.0, 1.0])]


def test_a_split_gives_the_new_cell_the_other_side() -> None:
    cells = Cells(grid(1, 2), 8)
    assert cells.split(0, 1, 0.25, keeps_low=True) == 1
    assert cells.high[0].tolist() == [1.0, 0.25]
    assert cells.low[1].tolist() == [0.0, 0.25]


def test_halves_cuts_the_axis_that_is_longest_in_correlation_lengths() -> None:
    cells = Cells(grid(1, 2), 8)
    assert cells.halves(0, np.array([1.0, 0.5])) == (1, 0.5)
    assert cells.halves(0, np.array([0.5, 1.0])) == (0, 0.5)


def test_a_cell_too_narrow_is_not_halved() -> None:
    cells = Cells([([0.0], [1e-8]), ([1e-8], [1.0])], 8)
    assert cells.halves(0, np.ones(1)) is None


def test_only_the_last_split_of_a_cell_can_be_joined() -> None:
    cells = Cells(grid(1, 1), 8)
    first = cells.split(0, 0, 0.5, keeps_low=True)
    second = cells.split(0, 0, 0.25, keeps_low=True)
    assert cells.joinable() == [second]
    assert cells.join(second) == 0
    assert cells.joinable() == [first]
    cells.keep([0, first])
    assert cells.join(first) == 0
    cells.keep([0])
    assert (cells.low[0, 0], cells.high[0, 0], cells.size) == (0.0, 1.0, 1)


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 1), st.booleans(), st.booleans()), max_size=40),
    st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)),
)
def test_whatever_is_split_and_joined_the_cells_make_up_the_cube(
    moves: list[tuple[int, int, bool, bool]], point: tuple[float, float]
) -> None:
    cells = Cells(grid(2, 2), 64)
    for which, axis, keeps_low, join in moves:
        if join and cells.joinable():
            gone = cells.joinable()[which % len(cells.joinable())]
            cells.join(gone)
            cells.keep([cell for cell in range(cells.size) if cell != gone])
        else:
            cell = which % cells.size
            cells.split(cell, axis, 0.5 * float(cells.low[cell, axis] + cells.high[cell, axis]), keeps_low=keeps_low)
    assert volume(cells) == pytest.approx(1.0)
    found = cells.find(np.array(point))
    assert (cells.low[found] <= point).all()
    assert (point <= cells.high[found]).all()
    copy = Cells.from_state(json.loads(json.dumps(cells.state_dict())), 64)
    assert copy.state_dict() == cells.state_dict()


def test_too_many_cells_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="1 to 4"):
        Cells.from_state(Cells(grid(5, 1), 8).state_dict(), 4)
