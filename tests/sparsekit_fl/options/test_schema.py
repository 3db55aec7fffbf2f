"""The command line and Flower's run configuration offer the options of RunConfig, with its help and ranges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest

from sparsekit.errors import InvalidValueError
from sparsekit_fl.cli.options import RunOptions
from sparsekit_fl.deployment.plan import Plan
from sparsekit_fl.options.checked import Count
from sparsekit_fl.options.config import RunConfig, TrainingConfig
from sparsekit_fl.options.schema import Offer, Option, offers, options, plain_type, shown_help

COMMAND_LINE = """preset dataset model data_dir rounds clients cohort partition classes_per_client lack_classes alpha capability
heterogeneity bandit lr batch_size local_epochs seed engine supernodes ray_address workers device eval_every eval_clients
min_replies aggregation trim_share clip_norm dp_clip dp_noise dp_delta dp_noise_seed upload out resume quiet json
set config sampling init momentum weight_decay clip optimizer optimizer_args amp local_schedule local_warmup lr_decay
lr_schedule lr_warmup lr_step lr_gamma lr_end server_optimizer server_lr server_momentum server_beta2 server_tau
central_test augment partition_args availability async_buffer async_staleness async_clock
deterministic accept_code eval_global_every log"""

RUN_CONFIGURATION = {
    "method": "fedlps", "preset": "digits", "problem": "", "rounds": 0, "cohort": 0, "seed": 0, "eval-every": 0,
    "eval-clients": 0, "local-epochs": 0, "batch-size": 0, "lr": 0.0, "data-dir": "", "out": "", "resume": False, "nodes": 2,
    "deterministic": False, "eval-global-every": 0,
    "wait-seconds": 300.0, "timeout-seconds": 0.0, "min-replies": 0, "aggregation": "mean", "trim-share": 0.2,
    "clip-norm": 0.0, "dp-clip": 0.0, "dp-noise": 0.0, "dp-delta": 0.0, "upload": "float32", "memory": "nodes",
    "momentum": 0.0, "weight-decay": 0.0, "clip": 0.0, "optimizer": "sgd", "optimizer-args": "", "amp": "off",
    "local-schedule": "constant", "local-warmup": 0, "lr-decay": 0.0, "lr-schedule": "constant", "lr-warmup": 0, "lr-step": 0,
    "lr-gamma": 0.0, "lr-end": 0.0, "server-optimizer": "none", "server-lr": 0.0, "server-momentum": 0.9, "server-beta2": 0.99,
    "server-tau": 0.0, "availability": "", "async-buffer": 0, "async-staleness": 0.5,
    "async-clock": "",
}  # fmt: skip


def test_the_command_line_offers_every_option_that_has_a_panel_and_its_own() -> None:
    assert set(options(RunOptions)) == set(COMMAND_LINE.split())
    assert set(options(RunConfig, TrainingConfig)) < set(options(RunOptions))


def test_flowers_run_configuration_has_the_same_options_with_a_zero_for_what_is_not_given() -> None:
    written = Plan().to_run_config()
    assert written == RUN_CONFIGURATION
    assert {name: type(value) for name, value in written.items()} == {n: type(v) for n, v in RUN_CONFIGURATION.items()}
    assert "dp-noise-seed" not in written, "every node reads the run configuration"


def test_only_what_was_given_is_given() -> None:
    assert RunOptions(seed=0, lr=0.1, clients=3).given(RunConfig, TrainingConfig) == {"seed": 0, "lr": 0.1}
    assert Plan(rounds=3, trim_share=0.2, lr=0).given(RunConfig, TrainingConfig) == {"rounds": 3}


def test_a_range_of_the_schema_holds_wherever_the_option_is_offered() -> None:
    with pytest.raises(InvalidValueError, match=r"^--dp-delta must be in \(0, 1\), got 2\.0$"):
        RunOptions(dp_delta=2.0)
    with pytest.raises(InvalidValueError, match=r"^dp-delta must be in \(0, 1\), got 2\.0; 0 takes the default$"):
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
    @dataclass(frozen=True)
    @offers(RunConfig, without=("seed",))
    class Some(Offer):
        own: Annotated[Count, Option("Its own.", "How")] = 1

    assert Some().cohort is None
    assert not hasattr(Some(), "seed")
    assert Some().replaced(cohort=3).given(RunConfig) == {"cohort": 3}
    assert plain_type(Annotated[Count | None, 1]) is int
