"""What a new user meets on the command line: errors in the words of its options, and files that others can read."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from sparsekit.cli.main import execute

TINY = ("--rounds", "1", "--workers", "1", "--epochs", "1", "--quiet")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("user") / "run"
    before = os.umask(0o022)
    try:
        assert execute(["run", "fedlps", *TINY, "--out", str(out)]) == 0
    finally:
        os.umask(before)
    return out


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--set lr_step=3", "lr_step belongs to lr_schedule 'step'"),
        ("--set async_buffer=99", "async_buffer must be at most cohort (5)"),
        ("--set async_buffer=2 --set async_clock=wall", "needs nodes that answer one by one"),
        ("--set min_replies=99", "min_replies must be at most cohort (5)"),
        ("--set partition.classes_per_client=99", "partition.classes_per_client must be in [1, 10], got 99"),
        ("--set partition.alfa=1", "has no option 'alfa'"),
        ("--set training.optimizer_args='a b'", "training.optimizer_args must be NAME=VALUE"),
        ("--set training.momentum=1", "training.momentum must be in [0, 1), got 1.0"),
        ("--set training.momentun=1", "did you mean 'training.momentum'"),
        ("--set cohort=2 --cohort 3", "--cohort and --set both say cohort"),
        ("--set lr=.1 --set training.lr=.2", "--set names training.lr twice"),
        ("--epochs 0", "--epochs must be an integer >= 1, got 0"),
        ("--set sampling=poison", "did you mean 'poisson'? known: by-size, fixed, poisson, power-of-choice, uniform, or"),
        ("--set sampling=sgd", "sampling of method 'fedavg' must be a SamplingPolicy"),
        ("--config nosuch.toml", "--config nosuch.toml cannot be read: it does not exist"),
        ("--set availability=nosuch.csv", "availability nosuch.csv cannot be read: it does not exist"),
    ],
)
def test_an_error_names_options_as_they_were_typed(given: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["run", "fedavg", *TINY, *shlex.split(given)]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
