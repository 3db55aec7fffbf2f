"""Checked dataclasses: ranges in annotations, refused values in one sentence, and values that stay as they were given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import pytest
from pydantic import Field

from sparsekit.errors import InvalidValueError, UnknownNameError
from sparsekit_fl.options import (
    Checked,
    Count,
    Fraction,
    Hint,
    NonNegative,
    Positive,
    Ratio,
    Share,
    options_of,
    parse_value,
    read_keywords,
)


class Base(Checked):
    """As a policy's base class: no dataclass itself."""


@dataclass(frozen=True)
class Policy(Base):
    """One field of each kind."""

    proximal: Annotated[NonNegative, Hint("0 is plain SGD")] = 0.0
    clip: Positive | None = None
    every: Count = 1
    target: Fraction = 0.5
    select: Literal["last", "best"] = "last"
    rule: Literal["mean", "median", "krum"] = "mean"
    levels: Annotated[tuple[Ratio, ...], Field(min_length=1)] = (1.0,)
    anything: float = 0.0


@dataclass(frozen=True)
class Ordered(Policy):
    """With a rule between fields, and a field of its own."""

    low: Share = 0.0
    high: Share = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise InvalidValueError(f"low must be at most high, got {self.low} and {self.high}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"proximal": -1}, "proximal must be a finite number >= 0, got -1; 0 is plain SGD"),
        ({"proximal": float("nan")}, "proximal must be a finite number >= 0, got nan; 0 is plain SGD"),
        ({"proximal": "1"}, "proximal must be a finite number >= 0, got '1'; 0 is plain SGD"),
        ({"clip": float("inf")}, "clip must be a finite number > 0, or None, got inf"),
        ({"every": 0}, "every must be an integer >= 1, got 0"),
        ({"every": True}, "every must be an integer >= 1, got True"),
        ({"every": 1.0}, "every must be an integer >= 1, got 1.0"),
        ({"target": 1.0}, "target must be in (0, 1), got 1.0"),
        ({"select": "first"}, "select must be 'last' or 'best', got 'first'"),
        ({"rule": "mode"}, "rule must be one of mean, median, krum, got 'mode'"),
        (
            {"levels": (0.5, 2.0)},
            "levels must be one or more values, each in (0, 1], got (0.5, 2.0); a ratio is the share kept, so to prune 30 %"
            " pass 0.7",
        ),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_with_what_is(given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        Policy(**given)
    assert str(caught.value) == message


def test_a_text_without_an_annotation_is_a_number_true_false_or_a_word() -> None:
    texts = {"3": 3, "0.5": 0.5, "true": True, "False": False, "no": "no", "on": "on", "y": "y", "a,b": "a,b"}
    assert {text: parse_value(None, text, name="own") for text in texts} == texts


def test_a_replaced_value_is_checked_and_a_subclass_checks_what_it_inherits_and_adds() -> None:
    with pytest.raises(InvalidValueError, match="clip must be"):
        replace(Policy(), clip=0.0)
    with pytest.raises(InvalidValueError, match="proximal must be"):
        Ordered(proximal=-1.0)
    with pytest.raises(InvalidValueError, match=r"high must be in \[0, 1\], got 2"):
        Ordered(high=2)
    with pytest.raises(InvalidValueError, match="low must be at most high"):
        Ordered(low=0.8, high=0.2)


def split(*, clients: int, share: Fraction = 0.5, distinct: bool = True) -> None:
    """Split nothing.

    Args:
        clients: How many.
        share: Share of each,
            in words.
        distinct: Whether they differ.
    """


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"share": "abc"}, "split.share must be in (0, 1), got 'abc'"),
        ({"share": "2"}, "split.share must be in (0, 1), got 2.0"),
        ({"distinct": "maybe"}, "split.distinct must be true or false, got 'maybe'"),
        ({"distinct": 1}, "split.distinct must be true or false, got 1"),
        ({"shares": 1}, "split has no option 'shares'; did you mean 'share'?"),
        ({"clients": 3}, "split has no option 'clients'"),
    ],
)
def test_keywords_of_a_function_are_read_by_its_annotations(given: dict[str, object], message: str) -> None:
    with pytest.raises((InvalidValueError, UnknownNameError)) as caught:
        read_keywords(split, given, name="split", prefix="split.", without=("clients",))
    assert str(caught.value).startswith(message)


def test_text_becomes_what_the_annotation_says() -> None:
    read = read_keywords(split, {"share": "0.25", "distinct": "no"}, name="split")
    assert read == {"share": 0.25, "distinct": False}
    assert options_of(split)["share"].about == "Share of each, in words."
