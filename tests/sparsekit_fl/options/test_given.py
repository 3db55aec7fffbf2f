"""The command line and Flower's run configuration offer the options of RunConfig, with its help and ranges."""

from __future__ import annotations

import pickle
from typing import Annotated

import pytest

from sparsekit.errors import InvalidValueError, UnknownNameError
from sparsekit_fl.cli.options import RunOptions
from sparsekit_fl.deployment.plan import Plan
from sparsekit_fl.options.checked import Count
from sparsekit_fl.options.config import RunConfig, TrainingConfig
from sparsekit_fl.options.given import Given, Option, options, plain_type, shown_help


def test_the_command_line_takes_every_option_that_has_a_panel() -> None:
    assert set(options(RunConfig, TrainingConfig)) < set(options(RunOptions))


def test_flowers_run_configuration_has_the_same_options_with_empty_text_for_what_is_not_given() -> None:
    written = Plan().to_run_config()
    offered = {name.replace("_", "-") for name in options(RunConfig, TrainingConfig)} - {"device", "capability"}
    # Every node reads the run configuration, and who knows the seed of the noise can remove it.
    assert offered - set(written) == {"dp-noise-seed"}
    assert all(isinstance(value, bool | int | float | str) for value in written.values())
    assert Plan.of(written) == Plan()
    assert Plan.of(written).given == {}
    # What is typed at the command line of Flower may be text, and zero is a value.
    given = Plan.of({**written, "rounds": "3", "lr": 0, "clip": "none", "upload": "bfloat16"})
    assert given == Plan(rounds=3, lr=0, clip=None, upload="bfloat16")
    assert given.given_of(TrainingConfig) == {"lr": 0, "clip": None}


def test_only_what_was_given_is_given() -> None:
    given = RunOptions(seed=0, lr=0.1, clients=3)
    assert given.given_of(RunConfig, TrainingConfig) == {"seed": 0, "lr": 0.1}
    assert (given.rounds, given.engine, given.quiet) == (None, None, False)
    assert given.replaced(lr=None, seed=1) == RunOptions(seed=1, clients=3)
    assert len({given, RunOptions(seed=0, lr=0.1, clients=3), RunOptions()}) == 2
    assert pickle.loads(pickle.dumps(given)) == given
    with pytest.raises(UnknownNameError, match="no option 'round'; did you mean 'rounds'"):
        RunOptions(round=3)
    with pytest.raises(AttributeError, match="cannot be changed"):
        given.seed = 3


def test_a_range_of_the_schema_holds_wherever_the_option_is_offered() -> None:
    with pytest.raises(InvalidValueError, match=r"^dp_delta must be in \(0, 1\), got 2\.0$"):
        RunOptions(dp_delta=2.0)
    with pytest.raises(InvalidValueError, match=r"^dp-delta must be in \(0, 1\), got 2\.0$"):
        Plan(dp_delta=2.0)
    with pytest.raises(InvalidValueError, match=r"^dp_delta must be in \(0, 1\), or None, got 2\.0$"):
        RunConfig(rounds=1, dp_clip=1.0, dp_noise=1.0, dp_delta=2.0)


def test_help_has_the_default_unless_a_preset_decides_or_there_is_none() -> None:
    assert shown_help(Option("Seed.", "How"), 0) == "Seed. Default: 0."
    assert shown_help(Option("Rounds.", "What", preset=True), 5) == "Rounds."
    assert shown_help(Option("Clip.", "How", unset="the median"), None) == "Clip. Default: the median."
    assert shown_help(Option("Quiet.", "How"), False) == "Quiet."


def test_every_option_of_a_run_says_what_it_is() -> None:
    for kind in (RunConfig, TrainingConfig):
        fields = set(kind.__dataclass_fields__) - {"training"}
        assert {name for name in fields if not _help(kind, name)} == set()


def _help(kind: type, name: str) -> str:
    from sparsekit_fl.options.checked import choices

    (choice,) = [choice for choice in choices(kind) if choice.name == name]
    return choice.note(Option).help


def test_a_class_may_offer_the_options_of_others() -> None:
    class Some(Given, offers=(RunConfig,), without=("seed",)):
        own: Annotated[Count, Option("Its own.", "How")] = 1

    assert Some().cohort is None
    assert not hasattr(Some(), "seed")
    assert Some().own == 1
    assert Some().replaced(cohort=3, own=2).given_of(RunConfig) == {"cohort": 3}
    assert plain_type(Annotated[Count | None, 1]) is int
