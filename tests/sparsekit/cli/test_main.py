"""The `sparsekit` command: units, plug-in commands, errors and exit codes."""

import json
import sys
from importlib.metadata import EntryPoint

import pytest
import typer

from sparsekit import registry
from sparsekit.cli import main as cli
from sparsekit.cli.table import COMMANDS


def test_units_of_a_built_in_model_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["units", "cnn"]) == 0
    out = capsys.readouterr().out
    assert "cnn: 80 units in 3 groups, 21,840 parameters" in out
    assert all(word in out for word in ("conv1", "conv2", "fc1", "channel", "feature", "fc2", "model output"))


def test_units_shows_whole_names_and_what_a_group_ties_at_80_columns(
    nets: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.execute(["units", f"{nets}:long_names"]) == 0
    out = capsys.readouterr().out
    assert "a_module_with_a_long_name.projection_of_the_first_block" in out
    assert cli.execute(["units", f"{nets}:long_names", "--json"]) == 0
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert group["ties"] == [f"a_module_with_a_long_name.{part}" for part in ("projection_of_the_first_block", "other", "out")]


def _plug_in(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    points = [EntryPoint(name, value, cli.commands.group) for name, value in values.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)


hello = typer.Typer()


@hello.command()
def _hello(name: str = "you") -> None:
    """Greet."""
    typer.echo(f"hello {name}")


def test_commands_of_other_packages_are_found_and_a_broken_one_spoils_only_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "other_package", sys.modules[__name__])
    _plug_in(monkeypatch, greet="other_package:hello", broken="nowhere_at_all:app", odd="math:pi")
    assert cli.execute(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f" {name} " in out for name in (*COMMANDS, "greet", "broken", "odd"))
    assert "not available" in out
    assert cli.execute(["greet", "--name", "world"]) == 0
    assert capsys.readouterr().out == "hello world\n"
    assert cli.execute(["broken", "--whatever", "1"]) == 2
    assert "nowhere_at_all" in capsys.readouterr().err
