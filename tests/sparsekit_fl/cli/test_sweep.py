"""`sparsekit sweep`: what is tried, kept and refused, and that every option of a run reaches the trials."""

import json
import signal

import pytest
from commands import ended
from personal import SMALL, command

pytest.importorskip("optuna", reason="optuna is not installed; pip install 'sparsekit-torch[optuna]'")

from sparsekit.cli.main import execute
from sparsekit_fl.cli.options import RunOptions
from sparsekit_fl.cli.run import _run as run_command
from sparsekit_fl.cli.sweep import _Plan, _run_one


@pytest.mark.same_bits
def test_a_sweep_tries_values_goes_on_and_writes_the_best(tmp_path, capsys):
    out = tmp_path / "sweep"
    line = ["sweep", "fedprox", *SMALL, "--space", "lr=0.01:1:log", "--space", "local.proximal=0.1,1", "--out", str(out)]
    first = command([*line, "--trials", "1"], capsys)
    both = command([*line, "--trials", "3", "--jobs", "2"], capsys)
    assert both["trials"][0] == first["trials"][0]
    assert len(both["trials"]) == 3
    best = command(["run", "--config", str(out / "best.toml")], capsys)
    kept = json.loads((out / f"trial-{both['best']['trial']:04d}" / "result.json").read_text())
    assert best["final"]["state_sha256"] == kept["final"]["state_sha256"]


def test_our_bandit_chooses_and_a_failed_trial_loses_no_other(capsys):
    line = ["sweep", "fedavg", *SMALL, "--space", "seed=0:1:int", "--sampler", "e-ucb", "--metric", "validation.f1"]
    assert execute([*line, "--trials", "2", "--json"]) == 2
    captured = capsys.readouterr()
    assert [row["state"] for row in json.loads(captured.out)["trials"]] == ["fail", "fail"]
    assert "all 2 trials have failed; the last: --metric validation.f1: the run has validation metrics" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--space", "lr=-1:1"], "lr must be a finite number >= 0"),
        (["--space", "lrr=0.1:1"], "did you mean 'lr'"),
        (["--space", "local.foo=0.1:1"], "no option 'local.foo'"),
        (["--space", "lr=0.1:1", "--sampler", "cma"], "unknown sampler 'cma'"),
        (["--space", "lr=0.1:1", "--metric", "test.accuracy"], "--metric must be validation.METRIC"),
        (["--space", "lr=0.1:1", "--trials", "0"], "'--trials': 0 is not in the range x>=1"),
    ],
)
def test_what_is_wrong_is_said_before_a_trial_runs(arguments, message, capsys):
    assert execute(["sweep", "fedavg", *SMALL, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_trial_gets_all_that_a_run_gets(tmp_path, monkeypatch):
    """What `sparsekit run` hands over, `sweep` does too: loggers, accepted code, initial weights."""
    pytest.importorskip("tensorboard")

    class Stopped(Exception):
        pass

    given = {}

    def noted(*arguments, **named):
        given.update(named)
        raise Stopped

    class Nobody:
        def send(self, event):
            pass

    options = RunOptions(clients=4, cohort=2, rounds=1, workers=1, accept_code=True, log=("tensorboard",), out=tmp_path)
    monkeypatch.setattr("sparsekit_fl.server.loop.run", noted)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        _run_one(Nobody(), _Plan("fedavg", options, "validation.accuracy"), {"lr": "0.1"}, tmp_path)
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
    of_sweep = dict(given)
    given.clear()
    with pytest.raises(Stopped):
        run_command("fedavg", options)
    assert of_sweep.keys() >= given.keys()
    assert of_sweep["accept_code"] is given["accept_code"] is True
    assert type(of_sweep["callbacks"][-1]) is type(given["callbacks"][-1])


@pytest.mark.slow
def test_a_sweep_that_was_killed_goes_on_to_the_same_trials(tmp_path, capsys):
    line = ["sweep", "fedavg", *SMALL[2:], "--rounds", "3", "--space", "lr=0.01:1:log", "--trials", "3", "--sampler", "p-ucbv"]
    whole = command([*line, "--out", str(tmp_path / "whole")], capsys)
    folder = tmp_path / "killed"
    ended([*line, "--out", str(folder)], signal.SIGKILL, (folder / "trial-0001" / "rounds.jsonl").exists)
    again = command([*line, "--out", str(folder)], capsys)
    assert [row.get("error") for row in again["trials"]] == [None] * 3
    assert [row["values"] for row in again["trials"]] == [row["values"] for row in whole["trials"]]
    assert [row["score"] for row in again["trials"]] == [row["score"] for row in whole["trials"]]
