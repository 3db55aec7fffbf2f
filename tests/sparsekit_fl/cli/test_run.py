"""`sparsekit run` and `sparsekit fedlps`: results, files, errors and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sparsekit.cli.main import execute

TINY = ["--rounds", "2", "--clients", "4", "--cohort", "2", "--epochs", "1", "--workers", "1"]

FACTORIES = """
import torch
from torch import nn
from sparsekit_fl import Client, ClientData, Method, Problem, TensorData
from sparsekit_fl.policies import ByCapability, Mean, UnitCriterion
from sparsekit.criteria import Ordered

def net():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))

def data(seed):
    generator = torch.Generator().manual_seed(seed)
    clients = []
    for id in range(3):
        x = torch.randn(30, 3, generator=generator)
        split = TensorData((x,), (x[:, 0] > 0).long())
        clients.append(Client(id=id, data=ClientData(split, split, split)))
    return Problem(model=net, example_inputs=(torch.zeros(1, 3),)), clients

def wide(classes, size):
    return nn.Sequential(nn.Flatten(), nn.Linear(size[0] * size[1], 16), nn.ReLU(), nn.Linear(16, classes))

def heterofl_like():
    aggregate = Mean("uniform", over="holders")
    return Method(name="mine", source="me", ratio=ByCapability(), mask=UnitCriterion(Ordered()), aggregate=aggregate)

def no_method():
    return 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"mine_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def _json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert execute([*arguments, "--json"]) == 0, capsys.readouterr().err
    captured = capsys.readouterr()
    assert captured.err == ""
    found: dict[str, Any] = json.loads(captured.out)
    return found


def test_a_run_prints_a_table_and_says_how_to_keep_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["run", "fedavg", *TINY]) == 0
    captured = capsys.readouterr()
    assert "fedavg · cnn on digits · 2 rounds · seed 0" in captured.out
    for title in (
        "personal accuracy",
        "global accuracy",
        "FLOPs, compact",
        "FLOPs, row mask",
        "sent up",
        "wall time",
        "--out DIR",
    ):
        assert title in captured.out
    assert captured.err == ""


def test_json_is_the_result_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    result = _json(["run", "fedavg", *TINY, "--seed", "3", "--lr", "0.05", "--batch-size", "8"], capsys)
    assert set(result) >= {"method", "config", "seed", "final", "cost", "rounds", "environment"}
    assert result["seed"] == 3
    assert result["config"]["rounds"] == 2
    assert result["config"]["cohort"] == 2
    assert result["config"]["training"]["lr"] == 0.05
    assert result["config"]["training"]["batch_size"] == 8
    assert result["config"]["training"]["local_epochs"] == 1
    assert result["config"]["experiment"]["dataset"] == "digits"
    assert len(result["final"]["per_client"]) == 4
    assert set(result["cost"]) == {
        "flops_compact", "flops_rowmask", "uplink_bytes", "downlink_bytes", "simulated_seconds", "wall_seconds"
    }  # fmt: skip


@pytest.mark.same_bits
def test_out_holds_the_files_and_resume_gives_the_same_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "run")]
    first = _json(["run", "fedavg", *TINY, *out], capsys)
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"result.json", "rounds.jsonl", "models"}
    assert json.loads((tmp_path / "run/result.json").read_text())["final"] == first["final"]
    again = _json(["run", "fedavg", *TINY, *out, "--resume"], capsys)
    assert again["final"] == first["final"]


def test_a_used_folder_and_a_changed_option_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "run")]
    _json(["run", "fedavg", *TINY, *out], capsys)
    assert execute(["run", "fedavg", *TINY, *out]) == 2
    assert "--resume" in capsys.readouterr().err
    assert execute(["run", "fedavg", *TINY, *out, "--resume", "--lr", "0.01"]) == 2
    assert "config.training.lr: was 0.1, now 0.01" in capsys.readouterr().err


def test_levels_of_heterogeneity_decide_capabilities_and_classes(capsys: pytest.CaptureFixture[str]) -> None:
    config = _json(["run", "fedavg", *TINY, "--heterogeneity", "median", "--set", "partition.lack_classes=6"], capsys)["config"]
    assert config["capability_levels"] == [1.0, 0.5, 0.25]
    assert config["experiment"]["partition_options"] == {"lack_classes": 6}
    assert _json(["run", "fedavg", *TINY], capsys)["config"]["capability_levels"] == [1.0, 0.5, 0.25, 0.125, 0.0625]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "fedlbs"], "did you mean 'fedlps'"),
        (["run", "MINE:no_method"], "must be a Method"),
        (["fedlps", "--dataset", "minst"], "did you mean 'mnist'"),
        (["fedlps", "--preset", "cifar"], "unknown preset"),
        (["fedlps", "--model", "vgg111"], "did you mean 'vgg11'"),
        (["fedlps", "--engine", "embeded"], "did you mean 'embedded'"),
        (["fedlps", "--engine", "cohort", "--workers", "2"], "--workers is not for engine 'cohort', which runs in one process"),
        (["fedlps", "--model", "lstm"], "takes token ids"),
        (["fedlps", "--rounds", "0"], "rounds must be an integer >= 1"),
        (["fedlps", "--clients", "0"], "--clients must be an integer >= 1"),
        (["fedlps", "--cohort", "0"], "--cohort must be an integer >= 1"),
        (["fedlps", "--cohort", "21"], "there are 20 clients"),
        (["fedlps", "--seed", "-1"], "seed must be an integer >= 0"),
        (["fedlps", "--eval-every", "0"], "--eval-every must be an integer >= 1, got 0"),
        (["fedlps", "--workers", "0"], "--workers must be an integer >= 1"),
        (["fedlps", "--lr", "-1"], "--lr must be a finite number >= 0, got -1.0"),
        (["fedlps", "--batch-size", "0"], "--batch-size must be an integer >= 1, got 0"),
        (["fedlps", "--epochs", "0"], "--epochs must be an integer >= 1, got 0"),
        (["fedlps", "--set", "capability=often"], "'fixed' or 'dynamic', got 'often'"),
        (["run", "rcr-fix", "--set", "capability=dynamic"], "contradicts 'rcr-fix'"),
        (["fedlps", "--device", "tpu9"], "--device must be"),
        (["fedlps", "--partition", "even"], "unknown partition"),
        (["fedlps", "--partition", "dirichlet", "--set", "partition.distinct=true"], "'dirichlet' has no option 'distinct'"),
        (["fedlps", "--set", "partition.alpha=0.3"], "'pathological' has no option 'alpha'"),
        (["fedlps", "--heterogeneity", "much"], "--heterogeneity must be one of low, median, high"),
        (["fedlps", "--set", "partition.lack_classes=10"], "partition.lack_classes must be an integer in [0, 9]"),
        (
            ["fedlps", "--set", "partition.lack_classes=2", "--set", "partition.classes_per_client=2"],
            "partition.classes_per_client cannot be given too",
        ),
        (
            ["fedlps", "--set", "partition.lack_classes=2", "--partition", "dirichlet"],
            "partition.lack_classes belongs to the partition 'pathological'",
        ),
        (["fedlps", "--resume"], "--resume needs --out"),
        (["fedlps", "--data-dir", "/no/such/folder"], "is not a folder"),
        (["fedlps", "--rounds", "many"], "not a valid int"),
    ],
)
def test_bad_options_are_one_sentence_and_code_2(
    mine: str, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute([argument.replace("MINE", mine) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in " ".join(captured.err.replace("│", " ").split())
    assert "Traceback" not in captured.err


@pytest.mark.slow
@pytest.mark.same_bits
def test_ctrl_c_ends_cleanly_and_the_run_resumes_to_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["run", "fedavg", "--rounds", "40", "--clients", "4", "--cohort", "2", "--workers", "2", "--seed", "1"]
    whole = _json(options, capsys)
    out = tmp_path / "run"
    # A shell that starts tests in the background lets them ignore SIGINT, and children inherit that.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);from sparsekit.cli.main import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, *options, "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (out / "checkpoint.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stdout == ""
    assert "--resume" in stderr
    assert "Traceback" not in stderr
    again = _json([*options, "--out", str(out), "--resume"], capsys)
    assert again["final"] == whole["final"]
