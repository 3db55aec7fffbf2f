"""What a new user meets on the command line: errors in the words of its options, and files that others can read."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

import numpy as np
import pytest

from sparsekit.cli.main import execute

TINY = ("--rounds", "1", "--workers", "1", "--local-epochs", "1", "--quiet")


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
        ("--set training.momentum=1", "training.momentum must be in [0, 1), got '1'"),
        ("--set training.momentun=1", "did you mean 'training.momentum'"),
        ("--set cohort=2 --cohort 3", "--cohort and --set both say cohort"),
        ("--set lr=.1 --set training.lr=.2", "--set names training.lr twice"),
        ("--local-epochs 0", "--local-epochs must be an integer >= 1, got 0"),
        ("--set sampling=poison", "did you mean 'poisson'? known: by-size, fixed, poisson, power-of-choice, uniform, or"),
        ("--set sampling=sgd", "sampling of method 'fedavg' must be a SamplingPolicy"),
        ("--config nosuch.toml", "--config nosuch.toml cannot be read: it does not exist"),
        ("--set availability=nosuch.csv", "availability nosuch.csv cannot be read: it does not exist"),
    ],
)
def test_an_error_names_options_as_they_were_typed(given: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["run", "fedavg", *TINY, *shlex.split(given)]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_an_optimizer_lists_the_arguments_that_belong_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["run", "fedavg", *TINY, "--optimizer", "adam", "--set", "training.optimizer_args=bettas=3"]) == 2
    told = capsys.readouterr().err
    assert "did you mean 'betas'?" in told
    assert "params" not in told


def test_an_axis_of_a_sweep_that_is_no_option_is_answered_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    assert execute(["sweep", "fedprox", "--space", "local_epoch=1,2", *TINY]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "did you mean 'local_epochs'? `sparsekit list options` and `sparsekit describe fedprox` show them" in told


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("predict OUT --input nosuch.npy", "nosuch.npy cannot be read: it does not exist"),
        ("predict OUT --input x.npy --output nosuch/y.npy", "--output nosuch/y.npy: there is no folder nosuch"),
        ("export OUT", "say what to write: --onnx or --pt2"),
        ("export OUT --onnx --pt2", "--onnx and --pt2 are two files; leave one out"),
        ("export OUT --pt2 --to nosuch/m.pt2", "--to nosuch/m.pt2: there is no folder nosuch; make it first"),
        ("export OUT --pt2 --to .", "--to . is a folder; name a file in it"),
    ],
)
def test_files_that_cannot_be_are_refused_in_words(
    run: Path, tmp_path: Path, given: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.zeros((1, 1, 8, 8), np.float32))
    assert execute([str(run) if word == "OUT" else word for word in given.split()]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_others_can_read_what_a_run_leaves(run: Path) -> None:
    files = [path for path in run.rglob("*") if path.is_file()]
    assert any(path.name == "global.safetensors" for path in files)
    assert [path.name for path in files if not path.stat().st_mode & stat.S_IROTH] == []
