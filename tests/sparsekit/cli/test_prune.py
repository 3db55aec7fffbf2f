"""The `sparsekit` command: units, pruning, plug-in commands, files, output, and bad input."""

import html
import json
import logging
import os
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import save_file
from torch import nn

import sparsekit as sk
from sparsekit import registry
from sparsekit.cli import main as cli
from sparsekit.cli.data_source import metric_of
from sparsekit.cli.model_source import load_checkpoint, load_model
from sparsekit.cli.table import COMMANDS
from sparsekit.graph.refusals import folded


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.execute([*arguments, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_it_writes_the_model_and_the_report(
    nets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "small"
    report = _json(capsys, "prune", f"{nets}:make", "--budget", "flops=50%", "--multiple-of", "2", "--out", str(out))
    assert report["after"]["flops"] <= 0.5 * report["before"]["flops"]
    assert {pair["batch"] for pair in report["times"]} >= {1}
    assert all(0 < pair["low"] <= pair["faster"] <= pair["high"] for pair in report["times"])
    assert {path.name for path in out.iterdir()} == {"model.safetensors", "report.html", "report.json"}
    page = (out / "report.html").read_text()
    file = "sk.load_compact(&quot;model.safetensors&quot;"
    assert all(part in page for part in ("--budget flops=50%", "Groups", "Cannot be pruned", "model output", file))
    assert all(f"<th>{group['name']}</th><td>{group['before']} → {group['after']} " in page for group in report["groups"])
    assert json.loads((out / "report.json").read_text())["after"] == report["after"]
    names: dict[str, Any] = {}
    monkeypatch.chdir(out)  # where the page is
    exec(html.unescape(re.findall(r"<pre>(import sparsekit.*?)</pre>", page, re.S)[0]), names)
    assert sum(entry.numel() for entry in names["model"].parameters()) == report["after"]["params"]


@pytest.mark.parametrize("place", ["sparsekit.pruning.prune.prune", "sparsekit.pruning.report.prune_page"])
@pytest.mark.parametrize("stop", [KeyboardInterrupt(), RuntimeError("no")])
def test_a_run_that_ends_early_says_what_is_left_and_leaves_no_empty_folder(
    place: str, stop: BaseException, nets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def broken(*_: object, **__: object) -> None:
        raise stop

    monkeypatch.setattr(place, broken)
    monkeypatch.chdir(tmp_path)
    line = ["prune", f"{nets}:make", "--budget", "flops=50%", "--time", "none", "--out", "runs/small"]
    assert cli.execute(line) == (2 if isinstance(stop, RuntimeError) else 130)
    told = capsys.readouterr().err
    if place.endswith("page"):
        assert os.listdir("runs/small") == ["model.safetensors"]
        assert isinstance(stop, RuntimeError) or "interrupted: runs/small has model.safetensors, and no report.json" in told
    else:
        assert not Path("runs").exists()
        assert isinstance(stop, RuntimeError) or "interrupted: nothing was written" in told


def test_messages_name_flags_and_not_arguments_of_python(nets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = _made(nets)
    model(torch.randn(32, 1, 8, 8))  # its batch norm has statistics of data
    save_file(model.state_dict(), tmp_path / "trained.safetensors")
    trained = ["prune", f"{nets}:make", "--init", str(tmp_path / "trained.safetensors"), "--budget", "flops=50%"]
    assert cli.execute([*trained, "--time", "none"]) == 0
    shown = capsys.readouterr().out
    assert "--dataset" in shown
    assert not re.search(r"batches=|exclude=|criterion=", shown)


def _made(nets: str) -> Any:
    return load_model(f"{nets}:make")[0]


@pytest.mark.same_bits
def test_data_score_reconstruct_and_train_the_small_model(
    nets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["prune", f"{nets}:make", "--budget", "flops=40%", "--dataset", f"{nets}:batches", "--batch-size", "8",
                 "--criterion", "taylor", "--reconstruct", "both", "--epochs", "2", "--distill", "0.5", "--out",
                 str(tmp_path / "a")]  # fmt: skip
    report = _json(capsys, *arguments)
    assert set(report["measured"]) == {
        "accuracy_dense", "reconstruction_error", "accuracy_pruned", "accuracy_finetuned", "best_epoch"
    }  # fmt: skip
    assert all(name.isidentifier() and 0 <= value <= 2 for name, value in report["measured"].items())
    again = _json(capsys, *arguments[:-1], str(tmp_path / "b"))
    state, other = (sk.load_compact(tmp_path / run / "model.safetensors", lambda: _made(nets)).state_dict() for run in "ab")
    assert all(torch.equal(value, other[name]) for name, value in state.items()), "the same seed, the same bits"
    assert again["groups"] == report["groups"]


@pytest.mark.parametrize(
    ("data", "scored", "note"),
    [
        ("[(torch.randn(8, 1, 8, 8), torch.randint(3, (8,))) for _ in range(10)]", True, "the last fifth of its batches"),
        ("[(torch.randn(8, 1, 8, 8), torch.rand(8, 3)) for _ in range(10)]", False, "No scores: accuracy needs the index"),
        ("[(torch.randn(8, 1, 8, 8), torch.randint(3, (8,)))]", False, "Let it return (training, validation)"),
    ],
)
def test_without_validation_data_a_report_has_scores_where_the_data_allow_and_says_why_not(
    nets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], data: str, scored: bool, note: str
) -> None:
    (tmp_path / "data.py").write_text(f"import torch\n\ndef load():\n    return {data}\n", encoding="utf-8")
    given = ["--budget", "flops=50%", "--criterion", "magnitude", "--time", "none", "--out", str(tmp_path / "small")]
    report = _json(capsys, "prune", f"{nets}:make", "--dataset", f"{tmp_path / 'data.py'}:load", *given)
    assert ("accuracy_pruned" in report["measured"]) == scored
    assert sum(note in each for each in report["notes"]) == 1


def test_a_folder_with_a_run_is_not_written_over(nets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").touch()
    assert cli.execute(["prune", f"{nets}:make", "--budget", "flops=50%", "--out", str(tmp_path)]) == 2
    assert "holds a run already; pass another --out" in capsys.readouterr().err


def test_checkpoints_are_read_in_every_usual_form(nets: str, tmp_path: Path) -> None:
    model, target = _made(nets), _made(nets)
    state = {
        name: torch.randn_like(value) if value.is_floating_point() else value for name, value in model.state_dict().items()
    }
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "b.pt")
    torch.save({"epoch": 3, "state_dict": {f"module.{name}": value for name, value in state.items()}}, tmp_path / "c.pt")
    for name in ("a.safetensors", "b.pt", "c.pt"):
        target = _made(nets)
        load_checkpoint(target, tmp_path / name)
        assert all(torch.equal(value, state[key]) for key, value in target.state_dict().items())


@pytest.mark.slow
def test_the_small_model_is_written_as_onnx_without_a_warning(
    nets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Torch lists the operators of torchvision if that is not installed."""
    runtime = pytest.importorskip("onnxruntime", reason="the extra 'export' is not installed")
    out = tmp_path / "small"
    _json(capsys, "prune", f"{nets}:make", "--budget", "flops=50%", "--out", str(out), "--onnx")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    small = sk.load_compact(out / "model.safetensors", lambda: _made(nets)).eval()
    session = runtime.InferenceSession(str(out / "model.onnx"))
    for examples in (1, 2, 5):
        x = torch.randn(examples, 1, 8, 8)
        [found] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), small(x), rtol=1e-4, atol=1e-5)


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


hello = typer.Typer()


@hello.command()
def _hello(name: str = "you") -> None:
    """Greet."""
    typer.echo(f"hello {name}")


def test_commands_of_other_packages_are_found_and_a_broken_one_spoils_only_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "other_package", sys.modules[__name__])
    found = {"greet": "other_package:hello", "broken": "nowhere_at_all:app", "odd": "math:pi"}
    points = [EntryPoint(name, value, cli.commands.group) for name, value in found.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    assert cli.execute(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f" {name} " in out for name in (*COMMANDS, "greet", "broken", "odd"))
    assert "not available" in out
    assert cli.execute(["greet", "--name", "world"]) == 0
    assert capsys.readouterr().out == "hello world\n"
    assert cli.execute(["broken", "--whatever", "1"]) == 2
    assert "nowhere_at_all" in capsys.readouterr().err


def test_a_score_on_validation_data_is_larger_for_the_better_model() -> None:
    x = torch.randn(8, 3)
    exact, off = torch.nn.Identity(), torch.nn.Hardtanh(-0.1, 0.1)
    loss = metric_of([(x[:6], x[:6]), (x[6:], x[6:])], torch.nn.functional.mse_loss)
    assert loss(off) == pytest.approx(-float((off(x) - x).square().mean()))
    assert loss(off) < loss(exact) == 0.0
    hits = metric_of([(x, x.argmax(1))], torch.nn.functional.cross_entropy)
    assert (hits(exact), hits(torch.nn.Threshold(9.0, 0.0))) == (1.0, float((x.argmax(1) == 0).float().mean()))
    assert (loss.__name__, hits.__name__) == ("minus_loss", "accuracy")
