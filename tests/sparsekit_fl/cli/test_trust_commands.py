"""Commands: failures have an exit code of their own, and what other code or other data ran is not taken for finished."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparsekit.cli.main import execute

pytestmark = pytest.mark.slow

TINY = ["--rounds", "2", "--clients", "4", "--cohort", "4", "--epochs", "1", "--workers", "1", "--quiet"]

FACTORIES = """
import torch
from torch import nn
from sparsekit_fl import Client, ClientData, Problem, TensorData

def net():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))

def data(seed):
    clients = []
    for id in range(4):
        x = torch.randn(30, 5 if id == 2 else 3, generator=torch.Generator().manual_seed(id))
        split = TensorData((x,), (x[:, 0] > 0).long())
        clients.append(Client(id=id, data=ClientData(split, split, split)))
    return Problem(model=net, example_inputs=(torch.zeros(1, 3),)), clients
"""


def test_clients_that_cannot_train_are_named_in_the_summary_and_the_exit_code_is_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"unfit_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["run", "fedavg", "--dataset", f"{name}:data", "--rounds", "2", "--cohort", "4", "--workers", "1", "--quiet"]
    assert execute(arguments) == 3
    text = " ".join(capsys.readouterr().out.split())
    assert "1 of 4 clients that were asked could never train" in text
    assert "client 2: client 2 failed in round 2" in text
    assert "client 2 was not scored" in text
    assert execute([*arguments, "--json"]) == 3
    assert [one["client"] for one in json.loads(capsys.readouterr().out)["failed_clients"]] == [2]


def test_a_comparison_refuses_a_finished_run_of_other_data_and_of_other_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare = ["compare", "fedavg", "--seeds", "1", *TINY, "--out", str(tmp_path)]

    def changed(**fingerprint: str) -> None:
        path = tmp_path / "fedavg-seed0" / "result.json"
        raw = json.loads(path.read_text())
        path.write_text(json.dumps({**raw, "fingerprint": {**raw["fingerprint"], **fingerprint}}))

    assert execute(compare) == 0
    assert execute(compare) == 0
    capsys.readouterr()
    changed(code="0123456789ab")
    assert execute(compare) == 2
    assert "--accept-code" in capsys.readouterr().err
    assert execute([*compare, "--accept-code"]) == 0
    changed(data="0" * 16)
    assert execute([*compare, "--accept-code"]) == 2
    assert "was run on other data" in capsys.readouterr().err


@pytest.mark.same_bits
def test_a_run_is_resumed_and_extended_by_its_folder_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "run")]
    assert execute(["run", "fedprox", *TINY, "--set", "local.proximal=0.5", "--lr", "0.05", "--seed", "3", *out]) == 0
    capsys.readouterr()
    assert execute(["run", "--resume", *out, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["method"], first["seed"], first["config"]["training"]["lr"]) == ("fedprox", 3, 0.05)
    assert execute(["run", "--resume", *out, "--rounds", "4", "--json"]) == 0
    longer = json.loads(capsys.readouterr().out)
    assert len(longer["rounds"]) == 4
    assert longer["extended"] == [2]
    assert execute(["run", "--resume", *out, "--lr", "0.1"]) == 2
    assert "config.training.lr: was 0.05, now 0.1" in capsys.readouterr().err
    assert execute(["run", "--resume", *out, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rounds"]) == 4
