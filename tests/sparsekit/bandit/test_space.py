"""Box: the way to the unit cube and back, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekit.bandit.base import Interval
from sparsekit.bandit.space import Box
from sparsekit.errors import InvalidValueError

BOX = Box({"lr": Interval(1e-4, 1.0, scale="log"), "width": Interval(16.0, 64.0)})


def test_a_point_goes_to_the_cube_on_the_scale_of_each_interval() -> None:
    assert BOX.to_unit({"width": 28.0, "lr": 1e-2}) == pytest.approx((0.5, 0.25))
    assert BOX.from_unit((0.0, 1.0)) == {"lr": 1e-4, "width": 64.0}


@given(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)))
def test_the_way_back_ends_inside(shares: tuple[float, float]) -> None:
    point = BOX.from_unit(shares)
    assert point in BOX
    assert BOX.to_unit(point) == pytest.approx(shares, abs=1e-9)


@pytest.mark.parametrize(
    "intervals", [{}, [Interval(0.0, 1.0)], {"x": (0.0, 1.0)}, {"": Interval(0.0, 1.0)}, {3: Interval(0.0, 1.0)}]
)
def test_what_is_no_box_is_refused(intervals: Any) -> None:
    with pytest.raises(InvalidValueError):
        Box(intervals)
