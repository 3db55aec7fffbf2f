"""Interval, Box and Axis: the way to the unit cube and back, texts, and refusals."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekit.bandit.base import Box, Interval
from sparsekit.bandit.search_space import parse_axes
from sparsekit.errors import InvalidValueError

UNIT = Interval(0.0, 1.0)
BOX = Box({"lr": Interval(1e-4, 1.0, scale="log"), "width": Interval(16.0, 64.0)})


@pytest.mark.parametrize(
    ("space", "pairs"),
    [
        (Interval(2, 6), [(2.0, 0.0), (3.0, 0.25), (6.0, 1.0)]),
        (Interval(1e-4, 10.0, scale="log"), [(1e-4, 0.0), (1e-2, 0.4), (10.0, 1.0)]),
        (BOX, [({"lr": 1e-4, "width": 64.0}, (0.0, 1.0)), ({"lr": 1e-2, "width": 28.0}, (0.5, 0.25))]),
    ],
)
def test_values_lie_on_the_scale_of_their_interval(space: Any, pairs: list[tuple[Any, Any]]) -> None:
    for value, share in pairs:
        assert value in space
        assert space.to_unit(value) == pytest.approx(share, abs=1e-15)
        assert space.from_unit(share) == (value if share in (0.0, 1.0, (0.0, 1.0)) else pytest.approx(value, rel=1e-14))


@given(
    low=st.floats(1e-300, 1e300),
    factor=st.floats(1.0, 1e6),
    share=st.floats(0.0, 1.0),
    scale=st.sampled_from(["linear", "log"]),
)
def test_values_stay_in_the_interval_and_come_back(low: float, factor: float, share: float, scale: str) -> None:
    if not low < low * factor < math.inf:
        return
    space = Interval(low, low * factor, scale)  # type: ignore[arg-type]
    box = Box({"x": space, "y": UNIT})
    point = box.from_unit((share, share))
    assert point in box
    assert 0.0 <= space.to_unit(point["x"]) <= 1.0
    if factor > 1.001:
        assert box.to_unit(point) == pytest.approx((share, share), abs=1e-9)


def test_an_axis_is_read_from_the_text() -> None:
    distributions = pytest.importorskip("optuna.distributions")

    def read(text: str) -> Any:
        return parse_axes([text]).popitem()

    assert read("lr=1e-4:1e-1:log") == ("lr", distributions.FloatDistribution(1e-4, 0.1, log=True))
    assert read(" x = -3 : 5 ") == ("x", distributions.FloatDistribution(-3.0, 5.0))
    both = ("n", distributions.IntDistribution(1, 64, log=True))
    assert read("n=1:64:int:log") == read("n=1:64:log:int") == both
    assert read("local.proximal=0.1,1, none") == ("local.proximal", distributions.CategoricalDistribution(("0.1", "1", "none")))
    assert read("of=package.module:A,package.module:B")[1].choices == ("package.module:A", "package.module:B")


def interval(low: Any, high: Any, scale: Any = "linear") -> Callable[[], object]:
    return lambda: Interval(low, high, scale)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (interval(2.0, 1.0), "low must be below high"),
        (interval(0.0, 1.0, "log"), "low > 0"),
        (interval(math.nan, 1.0), "low must be a number, got nan"),
        (interval(-1e308, 1e308), "finite"),
        (interval(0.0, "1"), "high must be a number"),
        (interval(0.0, 1.0, "sqrt"), "'linear' or 'log'"),
        (lambda: Box({}), "Interval|Box"),
        *(
            (lambda text=text: parse_axes([text]), message)
            for text, message in (
                ("lr", "must be NAME=LOW:HIGH, .* got 'lr'"),
                ("lr=1,1", "at least two different values"),
                ("x=1:2:sqrt", "must be NAME=LOW:HIGH"),
                ("x=one:2", "at least two different values"),
                ("x=2:1", "x=2:1: low must be below high"),
                ("x=0.5:8:int", "bounds must be whole"),
                ("x=0:8:int:log", "begin at 1 or above"),
            )
        ),
    ],
)
def test_what_is_no_space_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        make()
