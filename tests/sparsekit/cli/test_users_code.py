"""What a user names is run: where it fails, one line says what failed and where, and no traceback follows."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from sparsekit.cli.main import execute

NETS = """
from torch import nn

def make():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

def boom():
    raise RuntimeError("no weights here")

def inner():
    return nn.Linear("four", 2)

def missing():
    open("nothing.csv")

def data(batch_size, colour):
    return []
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(NETS)
    Path("broken.py").write_text("def make(:\n")
    Path("needs.py").write_text("\nimport no_such_package\n")
    Path("bad.pt").write_text("no weights")
    Path("weights").mkdir()
    torch.save({}, "weights/last.pt")
    Path("empty").mkdir()
    Path("more.pt").write_bytes(pickle.dumps({"path": Path("x")}, protocol=2))
    return tmp_path


SHAPE = ["--example-shape", "1,4"]
LINES = [
    (["units", "nets.py"], "'nets.py' is a file; name what to take from it, as in nets.py:make"),
    (["units", "nets.py:boom", *SHAPE], "'nets.py:boom' failed with RuntimeError: no weights here (nets.py, line 8)"),
    (["units", "nets.py:inner", *SHAPE], "'nets.py:inner' failed with TypeError"),
    (["units", "nets.py:missing", *SHAPE], "'nets.py:missing' failed with FileNotFoundError"),
    (["units", "broken.py:make", *SHAPE], "'broken.py' failed with SyntaxError"),
    (["units", "needs.py:make", *SHAPE], "'needs.py' failed with ModuleNotFoundError: No module named 'no_such_package' (needs.py, line 2)"),
    (["units", "nets.py:make", *SHAPE, "--init", "empty"], "--init 'empty' is a folder; pass a file of weights"),
    (["units", "nets.py:make", *SHAPE, "--init", "weights"], "such as weights/last.pt"),
    (["units", "nets.py:make", *SHAPE, "--init", "bad.pt"], "bad.pt cannot be read as weights: "),
    (["units", "nets.py:make", *SHAPE, "--init", "more.pt"], "more.pt cannot be read as weights: "),
    (["sensitivity", "nets.py:make", *SHAPE, "--dataset", "nets.py:make"], "must give batches that can be read again"),
    (["sensitivity", "nets.py:make", *SHAPE, "--dataset", "nets.py:data"], "a loader takes no argument but data_dir, batch_size and seed"),
    (["sensitivity", "nets.py:make", *SHAPE, "--out", "no/such/file.json"], "--out must be a file in a folder that exists, got no/such/file.json"),
    (["tune", "false {x}", "--space", "x=0:1", "--metric", "m (.)", "--trials", "1", "-q"], "error: the only trial has failed: exit code 1"),
    (["tune", "echo {x}", "--space", "x=0:1", "--metric", "m (.)", "--trials", "1", "-q"], "the output has no match of the metric, 'm (.)'"),
]  # fmt: skip
# ruff: noqa: E501


@pytest.mark.parametrize(("line", "wanted"), LINES, ids=lambda part: " ".join(part)[:50] if isinstance(part, list) else "")
def test_a_line_says_what_failed_and_where(line: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(line) == 2
    told = capsys.readouterr().err
    assert wanted in told.replace(str(Path.cwd()) + "/", "")
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert "weights_only" not in told, "torch advises to run whatever code a file holds"
