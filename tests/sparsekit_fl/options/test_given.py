"""The command line and Flower's run configuration offer the options of RunConfig, with its help and ranges."""

from sparsekit_fl.cli.options import RunOptions
from sparsekit_fl.deployment.plan import Plan
from sparsekit_fl.options.checked import choices
from sparsekit_fl.options.config import RunConfig, TrainingConfig
from sparsekit_fl.options.given import Option, options


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


def test_every_option_of_a_run_says_what_it_is() -> None:
    for kind in (RunConfig, TrainingConfig):
        told = {choice.name for choice in choices(kind) if (option := choice.note(Option)) and option.help}
        assert told == set(kind.__dataclass_fields__) - {"training"}
