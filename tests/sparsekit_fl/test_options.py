"""Options: ranges in annotations, refused values in one sentence, text that becomes a value, and the options of a run."""

from __future__ import annotations

import doctest
import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import pytest
from pydantic import Field

from sparsekit.errors import InvalidValueError, UnknownNameError
from sparsekit_fl.cli.options import RunOptions
from sparsekit_fl.config import (
    HETEROGENEITY,
    Checked,
    Count,
    Fraction,
    NonNegative,
    NonNegativeCount,
    Option,
    Positive,
    Ratio,
    RunConfig,
    Share,
    TrainingConfig,
    option,
    options_of,
    read_keywords,
)
from sparsekit_fl.problem.data import CAPABILITY_LEVELS


@dataclass(frozen=True)
class Policy(Checked):
    """One field of each kind."""

    proximal: NonNegative = option(0.0, "A weight; 0 is plain SGD. It pulls.")
    clip: Positive | None = None
    every: Count = 1
    select: Literal["last", "best"] = "last"
    ratios: Literal["capability"] | Ratio = 1.0
    levels: tuple[Ratio, ...] = (1.0,)
    anything: float = 0.0


@dataclass(frozen=True)
class Ordered(Policy):
    """With a field of its own."""

    high: Fraction = 0.5
    proximal: NonNegative = 0.1
    clip: Positive | None = option(None, "None does not clip.")


@dataclass(frozen=True)
class Clipped(Ordered):
    """With another description."""

    clip: Positive | None = option(1.0, "Largest norm.")


@pytest.mark.parametrize(
    ("hint", "allowed", "refused"),
    [
        (Count, (1, 9), (0,)),
        (NonNegativeCount, (0, 9), (-1,)),
        (Positive, (1e-9, 9.0), (0.0, math.inf)),
        (NonNegative, (0.0, 9.0), (-1e-9, math.nan)),
        (Share, (0.0, 1.0), (-1e-9, 1.1)),
        (Fraction, (0.1,), (0.0, 1.0)),
        (Ratio, (1e-9, 1.0), (0.0, 1.1)),
    ],
)
def test_the_bounds_of_each_kind_of_number(hint, allowed, refused):
    one = Option("x", hint, None)
    for value in allowed:
        one.check(value)
    for value in refused:
        with pytest.raises(InvalidValueError):
            one.check(value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"proximal": -1}, "proximal must be greater than or equal to 0, got -1; proximal: A weight; 0 is plain SGD"),
        ({"proximal": float("nan")}, "proximal must be a finite number, got nan; proximal: A weight; 0 is plain SGD"),
        ({"proximal": "1"}, "proximal must be a valid number, got '1'; proximal: A weight; 0 is plain SGD"),
        ({"clip": float("inf")}, "clip must be a finite number, got inf; clip: None does not clip"),
        ({"every": True}, "every must be a valid integer, got True"),
        ({"every": 1.0}, "every must be a valid integer, got 1.0"),
        ({"select": "first"}, "select must be 'last' or 'best', got 'first'"),
        (
            {"ratios": 1.5},
            "ratios must be 'capability' or less than or equal to 1, got 1.5; ratios: Share that is kept: to prune"
            " 30 %, pass 0.7",
        ),
        ({"high": 1.0}, "high must be less than 1, got 1.0"),
        ({"anything": "0"}, "anything must be a valid number, got '0'"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_with_what_is(given, message):
    with pytest.raises(InvalidValueError) as caught:
        replace(Ordered(), **given)
    assert str(caught.value) == message


def split(
    *,
    clients: int,
    share: Annotated[Fraction, Field(description="Share of each.")] = 0.5,
    distinct: bool = True,
    most=20,
    kept: Annotated[Ratio, Field(description="Share of all.")] = 1.0,
) -> None:
    """Split nothing."""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"share": "abc"}, "split.share must be a valid number, got 'abc'; share: Share of each"),
        ({"share": "2"}, "split.share must be less than 1, got '2'"),
        ({"distinct": "maybe"}, "split.distinct must be a valid boolean, got 'maybe'"),
        ({"distinct": 1}, "split.distinct must be a valid boolean, got 1"),
        ({"most": "all"}, "split.most must be a valid integer, got 'all'"),
        ({"shares": 1}, "split has no option 'shares'; did you mean 'share'?"),
        ({"clients": 3}, "split has no option 'clients'"),
    ],
)
def test_keywords_of_a_function_are_read_by_its_annotations(given, message):
    with pytest.raises((InvalidValueError, UnknownNameError)) as caught:
        read_keywords(split, given, name="split", prefix="split.", without=("clients",))
    assert str(caught.value).startswith(message)


def test_text_becomes_what_the_annotation_says():
    assert read_keywords(split, {"share": "0.25", "distinct": "no", "most": "7"}, name="split") == {
        "share": 0.25, "distinct": False, "most": 7,
    }  # fmt: skip
    texts = {"clip": "none", "ratios": "0.5", "levels": "0.5, 1", "select": "best"}
    read = read_keywords(Policy, texts, name="policy")
    assert read == {"clip": None, "ratios": 0.5, "levels": (0.5, 1.0), "select": "best"}


def test_a_description_is_that_of_the_field_or_of_the_keyword_and_ends_the_docstring():
    assert [options_of(split)[name].about for name in ("share", "most", "kept")] == ["Share of each.", "", "Share of all."]
    found = {name: one.about for name, one in options_of(Ordered).items()}
    assert {name: about for name, about in found.items() if about} == {
        "proximal": "A weight; 0 is plain SGD. It pulls.",
        "clip": "None does not clip.",
        "ratios": "Share that is kept: to prune 30 %, pass 0.7.",
        "levels": "Share that is kept: to prune 30 %, pass 0.7.",
    }
    assert Policy.__doc__ == "One field of each kind.\n\nArgs:\n    proximal: A weight; 0 is plain SGD. It pulls."
    assert Ordered.__doc__ == "With a field of its own.\n\nArgs:\n    clip: None does not clip."
    assert options_of(Clipped)["clip"].about == "Largest norm."


def test_levels_of_heterogeneity_are_those_of_the_paper():
    assert HETEROGENEITY == {"low": (1, 0.5), "median": (1, 0.5, 0.25), "high": (1, 0.5, 0.25, 0.125, 0.0625)}
    assert HETEROGENEITY["high"] == CAPABILITY_LEVELS


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rounds": True}, "rounds must be a valid integer, got True"),
        ({"rounds": 1, "capability_levels": [0.5, 2.0]}, "capability_levels must be less than or equal to 1"),
        ({"rounds": 1, "training": 1.0}, "training must be a TrainingConfig, got float"),
        ({"rounds": 1, "min_replies": 99}, "min_replies must be at most cohort"),
    ],
)
def test_values_that_are_not_allowed_are_refused(given, message):
    with pytest.raises(InvalidValueError, match=message):
        RunConfig(**given)


def test_the_learning_rate_decays_from_round_to_round():
    decaying = RunConfig(rounds=3, lr_decay=0.5, training=TrainingConfig(lr=0.8))
    assert [decaying.training_in(round).lr for round in (1, 2, 3)] == [0.8, 0.4, 0.2]


@pytest.mark.parametrize("kind", [RunConfig, TrainingConfig, RunOptions])
def test_every_option_of_a_run_says_what_it_is_and_its_default(kind):
    found = options_of(kind).values()
    assert [one.name for one in found if not one.about] == []
    for one in found if kind is not RunOptions else ():
        if isinstance(one.default, bool | int | float | str):
            default = f"{one.default:g}" if isinstance(one.default, float) else str(one.default).lower()
            assert one.about.endswith(f"Default: {default}."), one.name


@pytest.mark.parametrize("kind", [RunConfig, TrainingConfig])
def test_the_example_in_help_runs(kind):
    tests = doctest.DocTestFinder(recurse=False).find(kind, globs={})
    assert sum(doctest.DocTestRunner().run(test).attempted for test in tests) == 3
    assert all(doctest.DocTestRunner().run(test).failed == 0 for test in tests)
