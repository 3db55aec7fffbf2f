"""Options of a run: checked and documented."""

import doctest

import pytest

from sparsekit.errors import InvalidValueError
from sparsekit_fl.cli.options import RunOptions
from sparsekit_fl.config import HETEROGENEITY, RunConfig, TrainingConfig, options_of
from sparsekit_fl.problem.data import CAPABILITY_LEVELS


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
    assert [name for name, option in options_of(kind).items() if not option.about] == []
    for name, option in options_of(kind).items() if kind is not RunOptions else ():
        if isinstance(option.default, bool | int | float | str):
            assert option.about.endswith(f"Default: {option.default:g}." if isinstance(option.default, float) else
                                         f"Default: {str(option.default).lower()}."), name  # fmt: skip


@pytest.mark.parametrize("kind", [RunConfig, TrainingConfig])
def test_the_example_in_help_runs(kind):
    tests = doctest.DocTestFinder(recurse=False).find(kind, globs={})
    assert sum(doctest.DocTestRunner().run(test).attempted for test in tests) == 3
    assert all(doctest.DocTestRunner().run(test).failed == 0 for test in tests)
