"""`--set`, `--config`, `list` and `describe`."""

import json
import re
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import typer
from personal import SMALL, command

from sparsekit.cli import command_app
from sparsekit.cli.main import execute
from sparsekit_fl.cli.listing import KINDS
from sparsekit_fl.cli.options import RunOptions, paths, text_of, with_run_options, written
from sparsekit_fl.config import RunConfig, TrainingConfig
from sparsekit_fl.methods import registry
from sparsekit_fl.paper.presets import PRESETS
from sparsekit_fl.stored import flat


@pytest.mark.same_bits
def test_what_a_run_writes_can_be_read_back_and_gives_the_same_bits(tmp_path, capsys):
    given = ["--set", "mu=0.1", "--lr", "0.05", "--seed", "3"]
    one = command(["run", "fedprox", *SMALL, *given, "--out", str(tmp_path / "a")], capsys)
    two = command(["run", "--config", str(tmp_path / "a" / "run.toml")], capsys)
    assert one["final"]["state_sha256"] == two["final"]["state_sha256"]
    assert one["config"] == two["config"]


def seen(arguments):
    """The options of `sparsekit run` with these arguments."""
    found = []

    def command(*, options: RunOptions) -> None:
        found.append(options)

    app = command_app(with_run_options(command), examples=())
    typer.main.get_command(app).main(arguments, standalone_mode=False)
    return found[0]


def test_flags_override_set_which_overrides_the_file_and_zero_false_and_none_are_values(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('deterministic = true\nseed = 7\nlr = 8.0\ntraining.clip = 2.0\ncallback = ["best"]\nout = "there"\n')
    given = ["--seed", "0", "--lr", "0", "--set", "deterministic=false", "--set", "lr=3", "--callback", "tensorboard"]
    changed = seen(["--config", str(file), *given, "--set", "training.clip=none"])
    assert changed.given_of(RunConfig, TrainingConfig) == {"deterministic": False, "seed": 0, "lr": 0.0, "clip": None}
    assert changed.callback == ("tensorboard",)
    clipping = replace(PRESETS["digits"], training=TrainingConfig(clip=1.0))
    assert clipping.config(changed.given_of(RunConfig, TrainingConfig), 20).training.clip is None
    resumed = seen(["--resume", "--out", str(tmp_path), *given])
    assert (resumed.deterministic, resumed.seed, resumed.lr, resumed.clip) == (False, 0, 0.0, 2.0)
    file.write_text(written("command", changed.given))
    assert seen(["--config", str(file)]).replaced(config=None) == changed.replaced(config=None, out=None)


def test_an_option_of_a_method_with_the_name_of_an_option_of_training_stays_that_of_the_method(tmp_path):
    typed = seen(["--set", "clip=3", "--set", "training.clip=2"])
    (tmp_path / "run.toml").write_text(written("command", typed.given))
    filed = seen(["--config", str(tmp_path / "run.toml")])
    assert (filed.clip, filed.settings()) == (typed.clip, typed.settings()) == (2.0, {"clip": "3"})


@pytest.mark.parametrize("command", ["run", "fedlps", "compare"])
def test_a_command_has_one_page_of_options(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert execute([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert 20 < len(set(re.findall(r"^│ \*? *--([a-z-]+)", out, re.M))) <= 30
    assert max(map(len, out.splitlines())) <= 80


def test_without_the_packages_of_federated_learning_a_command_says_what_to_install_and_the_core_is_listed():
    code = """
import contextlib, io, sys
sys.modules["pydantic"] = None
from sparsekit.cli.main import execute
for line in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as told:
        code = execute(line.split())
    print(line, code, "pydantic" in told.getvalue() and '".[fl]"' in told.getvalue())
"""
    lines = [f"list {kind}" for kind in (*KINDS, "options")] + ["describe fedprox", "fedlps"]
    found = subprocess.run([sys.executable, "-c", code, *lines], capture_output=True, text=True, check=True).stdout
    core = {"list criteria", "list models", "list bandits"}
    assert found.splitlines() == [f"{line} 0 False" if line in core else f"{line} 2 True" for line in lines]


def test_every_option_is_listed_and_no_option_of_a_method_has_the_name_of_one_of_a_run(capsys):
    assert execute(["list", "options", "--json"]) == 0
    listed = {setting["path"]: setting["about"] for setting in json.loads(capsys.readouterr().out)}
    assert {"rounds", "training.momentum", "partition.alpha", "partition.lack_classes"} <= set(listed)
    assert all(listed.values())
    assert listed["rounds"].endswith("Default: 60 (digits).")
    assert listed["heterogeneity"].endswith("Default: high (digits).")
    first = PRESETS["digits"]
    for name, value in flat(asdict(first.config({}, first.clients))).items():
        told = re.search(r"Default: (\S+) \(digits\)\.$", listed.get(name, ""))
        assert told is None or told[1] == text_of(value), name
    for name in registry:
        assert not set(registry[name]().options()) & set(paths()), name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds =", "is not TOML"),
        ("round = 3", "no option 'round'"),
        ('rounds = "three"', "rounds must be a valid integer, got 'three'"),
        ("resume = true", "no option 'resume'"),
    ],
)
def test_a_wrong_file_is_refused(text, message, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(text)
    assert execute(["run", "fedavg", "--config", str(tmp_path / "run.toml")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_has_a_line_about_it(kind, capsys):
    assert execute(["list", kind, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) >= 1
    assert all(item["about"] and "not available" not in item["about"] for item in found)
    assert execute(["list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [item["name"] for item in found]
    assert max(map(len, lines)) <= 80


def test_a_method_is_described_with_its_options(capsys):
    assert execute(["describe", "fedprox"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1812.06127 --set mu=VALUE" in out
    assert "Default: 0.01." in out


def test_a_broken_plug_in_says_so_and_spoils_nothing(monkeypatch, capsys):
    monkeypatch.setitem(registry._table, "broken", "nowhere_at_all:method")
    assert execute(["list", "methods", "--json"]) == 0
    about = {item["name"]: item["about"] for item in json.loads(capsys.readouterr().out)}
    assert "nowhere_at_all" in about["broken"]
    assert "FedAvg" in about["fedavg"]
