"""What `--space` says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekit.bandit import Interval
from sparsekit.bandit.space import Box
from sparsekit.errors import InvalidValueError
from sparsekit.tuning.knobs import Knob, parse_knobs, space_of


def test_a_knob_is_read_from_the_text() -> None:
    assert Knob.parse("lr=1e-4:1e-1:log") == Knob(name="lr", low=1e-4, high=0.1, scale="log")
    assert Knob.parse(" x = -3 : 5 ") == Knob(name="x", low=-3.0, high=5.0)
    assert (
        Knob.parse("n=1:64:int:log")
        == Knob.parse("n=1:64:log:int")
        == Knob(name="n", low=1.0, high=64.0, scale="log", integer=True)
    )
    assert str(Knob.parse("n=1:64:int:log")) == "n=1:64:log:int"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr", "must be NAME=LOW:HIGH, .* got 'lr'"),
        ("lr=1", "must be NAME=LOW:HIGH"),
        ("=1:2", "must be NAME=LOW:HIGH"),
        ("2x=1:2", "must be NAME=LOW:HIGH"),
        ("x y=1:2", "must be NAME=LOW:HIGH"),
        ("x=1:2:sqrt", "must be NAME=LOW:HIGH"),
        ("x=1:2:log:log", "must be NAME=LOW:HIGH"),
        ("x=1:2:log:linear", "must be NAME=LOW:HIGH"),
        ("x=one:2", "must be numbers"),
        ("x=2:1", "x=2:1: low must be below high"),
        ("x=nan:1", "low must be a number"),
        ("x=0:1:log", "low > 0"),
        ("x=0.5:8:int", "bounds must be whole"),
        ("x=0:8:int:log", "begin at 1 or above"),
        ("trial=1:2", "the number of the trial"),
    ],
)
def test_another_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        Knob.parse(text)


def test_no_knob_and_two_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="nothing to tune"):
        parse_knobs([])
    with pytest.raises(InvalidValueError, match="names x twice"):
        parse_knobs(["x=1:2", "y=1:2", "x=2:3"])


def test_whole_numbers_are_rounded_evenly() -> None:
    knob = Knob.parse("n=1:4:int")
    assert knob.interval == Interval(0.5, 4.5)
    shares = [knob.executed(knob.interval.from_unit((i + 0.5) / 400)) for i in range(400)]
    assert [shares.count(value) for value in (1.0, 2.0, 3.0, 4.0)] == [100] * 4
    assert (knob.executed(0.5), knob.executed(4.5)) == (1.0, 4.0)
    assert knob.text(3.0) == "3"


def test_values_have_six_digits_of_what_varies() -> None:
    assert Knob.parse("x=0:1").executed(0.123456789) == 0.123457
    assert Knob.parse("x=1e-5:1:log").executed(1.23456789e-5) == 1.23457e-5
    assert Knob.parse("x=1000000:1000001").executed(1000000.123456789) == 1000000.123457
    assert Knob.parse("x=0:1").text(1e-7) == "1e-07"
    assert Knob.parse("x=0:2").text(2.0) == "2"


@given(
    share=st.floats(0, 1), text=st.sampled_from(["x=0:1", "x=1e-9:1e9:log", "x=-3:5:int", "x=1:1000:log:int", "x=7:7.000001"])
)
def test_what_is_executed_stands_in_the_command_and_lies_in_the_interval(share: float, text: str) -> None:
    knob = Knob.parse(text)
    value = knob.executed(knob.interval.from_unit(share))
    assert knob.low <= value <= knob.high
    assert value in knob.interval
    assert float(knob.text(value)) == value
    assert set(knob.text(value)) <= set("0123456789.e+-")
    assert knob.executed(value) == value


def test_one_knob_makes_an_interval_and_several_a_box() -> None:
    knobs = parse_knobs(["a=1:2", "n=1:4:int"])
    assert space_of(knobs[:1]) == Interval(1.0, 2.0)
    assert space_of(knobs) == Box({"a": Interval(1.0, 2.0), "n": Interval(0.5, 4.5)})
