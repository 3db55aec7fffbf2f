"""What `--space` says."""

from __future__ import annotations

import pytest

from sparsekit.bandit.axes import Axis
from sparsekit.errors import InvalidValueError


def test_an_axis_is_read_from_the_text() -> None:
    assert Axis.parse("lr=1e-4:1e-1:log") == Axis(name="lr", low=1e-4, high=0.1, log=True)
    assert Axis.parse(" x = -3 : 5 ") == Axis(name="x", low=-3.0, high=5.0)
    both = Axis(name="n", low=1.0, high=64.0, log=True, integer=True)
    assert Axis.parse("n=1:64:int:log") == Axis.parse("n=1:64:log:int") == both
    assert Axis.parse("local.proximal=0.1,1, none") == Axis(name="local.proximal", choices=("0.1", "1", "none"))
    assert Axis.parse("of=package.module:A,package.module:B").choices == ("package.module:A", "package.module:B")
    assert (Axis.parse("x=0:2").ends(), Axis.parse("x=b,a").ends()) == (("0", "2"), ("b", "a"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr", "must be NAME=LOW:HIGH, .* got 'lr'"),
        ("lr=", "must be NAME=LOW:HIGH"),
        ("lr=1", "at least two different values"),
        ("lr=1,1", "at least two different values"),
        ("=1:2", "must be NAME=LOW:HIGH"),
        ("2x=1:2", "must be NAME=LOW:HIGH"),
        ("x y=1:2", "must be NAME=LOW:HIGH"),
        ("x=1:2:sqrt", "must be NAME=LOW:HIGH"),
        ("x=1:2:log:log", "must be NAME=LOW:HIGH"),
        ("x=one:2", "at least two different values"),
        ("x=2:1", "x=2:1: low must be below high"),
        ("x=nan:1", "low must be a number"),
        ("x=0:inf", "finite"),
        ("x=0:1:log", "low > 0"),
        ("x=0.5:8:int", "bounds must be whole"),
        ("x=0:8:int:log", "begin at 1 or above"),
    ],
)
def test_another_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        Axis.parse(text)
