"""Options: validated, the same after a trip through plain values, and offered by the command line and by Flower."""

import doctest
import inspect

import pytest

from sparsekit.errors import InvalidValueError, UnknownNameError
from sparsekit_fl.cli.flower_app import AppOptions
from sparsekit_fl.cli.options import RunOptions
from sparsekit_fl.config import _REQUIRES, HETEROGENEITY, RunConfig, TrainingConfig
from sparsekit_fl.options import options_of
from sparsekit_fl.problem.data import CAPABILITY_LEVELS


def test_levels_of_heterogeneity_are_those_of_the_paper():
    assert HETEROGENEITY == {"low": (1, 0.5), "median": (1, 0.5, 0.25), "high": (1, 0.5, 0.25, 0.125, 0.0625)}
    assert HETEROGENEITY["high"] == CAPABILITY_LEVELS


def test_unknown_keys_name_the_nearest():
    with pytest.raises(UnknownNameError, match="unknown option 'round' of the run; did you mean 'rounds'"):
        RunConfig.from_dict({"round": 3})
    with pytest.raises(UnknownNameError, match="unknown option 'epochs' of training"):
        RunConfig.from_dict({"rounds": 3, "training": {"epochs": 1}})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rounds": True}, "rounds must be an integer"),
        (
            {"rounds": 1, "capability_levels": ()},
            r"capability_levels must be one or more values, each in \(0, 1\], or None, got \(\); None keeps each client's own",
        ),
        ({"rounds": 1, "training": {"lr": float("nan")}}, "lr must be a finite number >= 0, got nan"),
        ({"rounds": 1, "training": 1.0}, "training must be a TrainingConfig, got float"),
        ({}, "lacks 'rounds'"),
    ],
)
def test_values_that_are_not_allowed_are_refused(given, message):
    with pytest.raises(InvalidValueError, match=message):
        RunConfig.from_dict(given)


GIVEN = {"lr_step": 3, "lr_gamma": 0.5, "lr_end": 0.2}


@pytest.mark.parametrize("name", _REQUIRES)
def test_an_option_without_the_feature_that_it_belongs_to_is_refused(name):
    feature, values = _REQUIRES[name]
    off = getattr(RunConfig(rounds=1), feature)
    with pytest.raises(InvalidValueError, match=f"^{name} belongs to {feature}.*, got {off!r}; leave it out"):
        RunConfig(rounds=1, **{name: GIVEN[name]})
    for value in values:
        config = RunConfig(rounds=1, **{feature: value, name: GIVEN[name]})
        assert getattr(config, name) == GIVEN[name]


SHARED = {*options_of(RunConfig), *options_of(TrainingConfig)} - {"training", "capability_levels"}
"""The options that commands and Flower's run configuration take by name."""


def test_the_command_line_takes_every_option_by_name() -> None:
    assert set(options_of(RunOptions)) > SHARED


def test_flowers_run_configuration_has_the_same_options_with_empty_text_for_what_is_not_given() -> None:
    written = AppOptions().to_run_config()
    offered = {name.replace("_", "-") for name in SHARED}
    assert offered <= set(written)
    assert all(isinstance(value, bool | int | float | str) for value in written.values())
    assert AppOptions.of(written) == AppOptions()
    assert AppOptions.of(written).given == {}
    # What is typed at the command line of Flower may be text, and zero is a value.
    given = AppOptions.of({**written, "rounds": "3", "lr": 0, "clip": "none", "upload": "bfloat16"})
    assert given == AppOptions(rounds=3, lr=0, clip=None, upload="bfloat16")
    assert given.given_of(TrainingConfig) == {"lr": 0, "clip": None}


@pytest.mark.parametrize("kind", [RunConfig, TrainingConfig, RunOptions, AppOptions])
def test_every_option_of_a_run_says_what_it_is(kind: type) -> None:
    assert [name for name, option in options_of(kind).items() if not option.about] == []


@pytest.mark.parametrize("kind", [RunConfig, TrainingConfig])
def test_help_names_every_field_with_its_default_within_100_columns(kind: type) -> None:
    text = inspect.getdoc(kind) or ""
    for name, option in options_of(kind).items():
        assert f"    {name}: " in text
        if isinstance(option.default, bool | int | float | str):
            assert option.about.endswith(f"Default: {option.default:g}." if isinstance(option.default, float) else
                                         f"Default: {str(option.default).lower()}."), name  # fmt: skip
    assert max(len(line) for line in text.splitlines()) <= 96, "help() adds four columns"
    assert "Annotated" not in str(inspect.signature(kind))


@pytest.mark.parametrize("kind", [RunConfig, TrainingConfig])
def test_the_example_in_help_runs(kind: type) -> None:
    tests = doctest.DocTestFinder(recurse=False).find(kind, globs={})
    assert sum(doctest.DocTestRunner().run(test).attempted for test in tests) == 3
    assert all(doctest.DocTestRunner().run(test).failed == 0 for test in tests)
