"""The `sparsekit` command: units, plug-in commands, errors and exit codes."""

import json
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
import torch
import typer
from torch import nn

from sparsekit import registry
from sparsekit.cli import main as cli
from sparsekit.cli.table import COMMANDS
from sparsekit.graph.refusals import folded


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
    assert group["coupled"] == [f"a_module_with_a_long_name.{part}" for part in ("other", "out")]
    assert group["flops_share"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([f"layer1.{i}.conv3" for i in range(3)], "layer1.{0–2}.conv3"),
        (["a.1.w", "a.4.w", "b"], "a.{1,4}.w, b"),
        (["x.0.1", "x.1.0"], "x.0.1, x.1.0"),  # x.0.0 is not among them
        ([f"h.{i}.{j}" for i in range(2) for j in range(3)], "h.{0–1}.{0–2}"),
        ([], ""),
    ],
)
def test_names_that_differ_in_numbers_alone_are_written_as_one(names: list[str], text: str) -> None:
    assert folded(names) == text


def test_models_of_other_libraries_are_found_by_their_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def net(*_: object, **__: object) -> nn.Module:
        made = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        made.default_cfg, made.dummy_inputs = {"input_size": (3, 32, 32)}, {"input": torch.zeros(1, 3, 32, 32)}
        return made

    tv = SimpleNamespace(list_models=lambda: ["tvnet"], get_model=net)
    timm = SimpleNamespace(is_model=lambda name: name == "timmnet", create_model=net)
    hf = SimpleNamespace(CONFIG_MAPPING={"hfnet": dict}, AutoModel=SimpleNamespace(from_config=net))
    for name, fake in {"torchvision": tv, "torchvision.models": tv, "timm": timm, "transformers": hf}.items():
        monkeypatch.setitem(sys.modules, name, fake)
    for name in ("tvnet", "timmnet", "hfnet"):
        assert cli.execute(["units", name]) == 0
        assert f"{name}: 8 units in 1 group" in capsys.readouterr().out
    assert cli.execute(["units", "nonet"]) == 2
    assert "torchvision, timm or transformers" in " ".join(capsys.readouterr().err.replace("│", " ").split())


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
