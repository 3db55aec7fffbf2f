"""The `sparsekit` command: units, plug-in commands, errors and exit codes."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer

from sparsekit.cli import main as cli
from sparsekit.errors import InvalidValueError

NETS = """
import torch
from torch import nn

def plain():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))

def with_input():
    return plain(), (torch.zeros(1, 4),)

def normed():
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), torch.zeros(1, 4)

def tokens():
    return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))

class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, tokens):
        if not (tokens != 0).any():
            raise ValueError("all tokens are padding")
        return self.head(self.hidden(self.embedding(tokens)).relu())

def no_units():
    return nn.Linear(4, 3), torch.zeros(1, 4)

def needs(argument):
    return plain()

ready = plain()

def wrong():
    return 3
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"nets_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(NETS)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_units_of_a_built_in_model_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["units", "cnn"]) == 0
    out = capsys.readouterr().out
    assert "cnn: 80 units in 3 groups, 21,840 parameters" in out
    assert all(word in out for word in ("conv1", "conv2", "fc1", "channel", "feature", "fc2", "model output", "ms a pass"))
    assert cli.execute(["units", "cnn", "--time", "none"]) == 0
    assert " ms" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["units", "vgg111"], "did you mean 'vgg11'"),
        (["units", "NETS:plain"], "no example input is known"),
        (["units", "NETS:plain", "--example-shape", "1,9"], "fails on the example inputs"),
        (["units", "NETS:plain", "--example-shape", "1,x"], "--example-shape must be positive integers"),
        (["units", "NETS:plain", "--example-shape", "1,4:int99"], "--example-shape must be positive integers"),
        (["units", "NETS:plane", "--example-shape", "1,4"], "did you mean 'plain'"),
        (["units", "NETS:no_units"], "can be removed exactly"),
        (["units", "NETS:needs"], "cannot be called without arguments"),
        (["units", "NETS:ready"], "class or function that builds a model"),
        (["units", "NETS:wrong"], "must return a torch.nn.Module"),
        (["units", "nowhere_at_all:Net"], "cannot import module"),
        (["units"], "Missing argument"),
        (["unitz"], "No such command"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    nets: str, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.execute([argument.replace("NETS", nets) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says.lower() in " ".join(captured.err.split()).lower()
    assert "Traceback" not in captured.err


def _plug_in(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    points = [EntryPoint(name, value, cli.COMMANDS_GROUP) for name, value in values.items()]
    monkeypatch.setattr(cli, "entry_points", lambda group: points)


hello = typer.Typer()


@hello.command()
def _hello(name: str = "you") -> None:
    """Greet."""
    typer.echo(f"hello {name}")


failing = typer.Typer()


@failing.command()
def _fail(how: str) -> None:
    """Fail."""
    raise {"ours": InvalidValueError("a sentence"), "ctrl-c": KeyboardInterrupt(), "os": OSError(28, "No space left")}[how]


def test_a_command_of_another_package_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "other_package", sys.modules[__name__])
    _plug_in(monkeypatch, greet="other_package:hello")
    assert cli.execute(["greet", "--name", "world"]) == 0
    assert capsys.readouterr().out == "hello world\n"


def test_a_broken_command_spoils_only_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "other_package", sys.modules[__name__])
    _plug_in(monkeypatch, greet="other_package:hello", broken="nowhere_at_all:app", odd="math:pi")
    assert cli.execute(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("greet", "broken", "odd", "units", "not available"))
    assert cli.execute(["greet"]) == 0
    capsys.readouterr()
    assert cli.execute(["broken", "--whatever", "1"]) == 2
    assert "nowhere_at_all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [("ours", 2, "error: a sentence"), ("os", 2, "No space left"), ("ctrl-c", 130, "")],
)
def test_exit_codes(
    how: str, code: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "other_package", sys.modules[__name__])
    _plug_in(monkeypatch, fail="other_package:failing")
    assert cli.execute(["fail", how]) == code
    assert says in capsys.readouterr().err
