"""`--set`, `--config` and `list`."""

import contextlib
import json
import re
import subprocess
import sys
from typing import get_origin

import pytest
import typer
from personal import SMALL, command

from sparsekit.cli import command_app
from sparsekit.cli.main import execute
from sparsekit.errors import InvalidValueError
from sparsekit_fl.cli.config_file import MOMENTARY, path_of, written
from sparsekit_fl.cli.listing import KINDS
from sparsekit_fl.cli.options import FROM_PRESET, RunOptions, known_options, with_run_options
from sparsekit_fl.config import RunConfig, TrainingConfig
from sparsekit_fl.methods import registry
from sparsekit_fl.options import options_of, parse_value, plain_type
from sparsekit_fl.paper.presets import PRESETS

TABLE = options_of(RunOptions)


@pytest.mark.same_bits
def test_what_a_run_writes_can_be_read_back_and_gives_the_same_bits(tmp_path, capsys):
    given = ["--set", "mu=0.1", "--lr", "0.05", "--seed", "3"]
    one = command(["run", "fedprox", *SMALL, *given, "--out", str(tmp_path / "a")], capsys)
    two = command(["run", "--config", str(tmp_path / "a" / "run.toml")], capsys)
    assert one["final"]["state_sha256"] == two["final"]["state_sha256"]
    assert one["config"] == two["config"]


def two_values(option):
    """Two values that an option allows, zero or false first where it allows that."""
    words = re.findall(r"'([^']+)'", str(option.hint).partition("Literal[")[2].partition("]")[0])
    kind = plain_type(option.hint)
    numbers = {int: (0, 1, 2), float: (0.0, 0.25, 0.5), bool: (False, True)}.get(kind, ("here", "there"))
    found = []
    for value in words or ([(word,) for word in numbers] if get_origin(kind) is tuple else map(kind, numbers)):
        with contextlib.suppress(InvalidValueError):
            option.check(value)
            found.append(value)
    return found[0], found[1]


def allows_none(hint):
    try:
        return parse_value(hint, "none", name="") is None
    except InvalidValueError:
        return False


@pytest.mark.parametrize("path", sorted(set(known_options()) - {*MOMENTARY, "data_dir"}))
def test_what_the_command_line_says_is_used_whatever_the_file_says(path, tmp_path):
    name, hint = known_options()[path]
    typed, filed = two_values(TABLE[name])
    line = ["--set", f"{path}={','.join(typed) if isinstance(typed, tuple) else typed}"]
    file = tmp_path / "run.toml"
    config = ["--config", str(file)]
    file.write_text(written("command", {name: filed} if name != "out" else {}))
    assert seen(config).given.get(name) == (filed if name != "out" else None)
    found = seen([*config, *line])
    assert found.given == {"config": file, name: typed}
    assert type(found.given[name]) is type(typed)
    if allows_none(hint):
        assert seen([*config, "--set", f"{path}=none"]).given == {"config": file, name: None}
        file.write_text(f'{path_of(name)} = "none"\n')
        assert seen(config).given == {"config": file, name: None}
        assert seen([*config, *line]).given == {"config": file, name: typed}


def seen(arguments):
    """The options of `sparsekit run` with these arguments."""
    found = []

    def command(*, options: RunOptions) -> None:
        found.append(options)

    app = command_app(with_run_options(command), examples=())
    typer.main.get_command(app).main(arguments, standalone_mode=False)
    return found[0]


def test_none_is_a_value_and_a_resumed_run_reads_its_own_file_below_the_line(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("deterministic = true\nseed = 7\nlr = 8.0\ntraining.clip = 2.0\n")
    given = ["--seed", "0", "--lr", "0", "--set", "deterministic=false"]
    changed = seen(["--config", str(file), *given, "--set", "training.clip=none"])
    # The preset of the text tasks would clip.
    assert changed.given_of(RunConfig, TrainingConfig) == {"deterministic": False, "seed": 0, "lr": 0.0, "clip": None}
    assert PRESETS["shakespeare"].config(changed.given_of(RunConfig, TrainingConfig), 20).training.clip is None
    resumed = seen(["--resume", "--out", str(tmp_path), *given])
    assert (resumed.deterministic, resumed.seed, resumed.lr, resumed.clip) == (False, 0, 0.0, 2.0)
    file.write_text(written("command", changed.given))
    assert seen(["--config", str(file)]).replaced(config=None) == changed.replaced(config=None)


def test_an_option_of_a_method_with_the_name_of_an_option_of_training_stays_that_of_the_method(tmp_path):
    typed = seen(["--set", "clip=3", "--set", "training.clip=2"])
    (tmp_path / "run.toml").write_text(written("command", typed.given))
    filed = seen(["--config", str(tmp_path / "run.toml")])
    assert (filed.clip, filed.settings()) == (typed.clip, typed.settings()) == (2.0, {"clip": "3"})


@pytest.mark.parametrize("command", ["run", "fedlps", "compare"])
def test_a_command_has_one_page_of_options_and_says_the_path_of_every_other(command, capsys):
    assert execute([command, "--help"]) == 0
    flags = set(re.findall(r"^│ \*? *--([a-z-]+)", capsys.readouterr().out, re.M))
    assert 20 < len(flags) <= 30
    left_out = {"compare": {"resume", "init"}}.get(command, set())
    for name in TABLE:
        flag = {"as_json": "json"}.get(name, name.replace("_", "-"))
        if flag not in flags | left_out:
            assert execute([command, *(["fedavg"] if command != "fedlps" else []), f"--{flag}", "0.5"]) == 2
            assert f"no such option --{flag}; pass --set {path_of(name)}=VALUE" in capsys.readouterr().err, name


def test_help_imports_nothing_that_takes_long():
    code = """
import sys
from sparsekit.cli.main import execute
for name in ("run", "fedlps", "compare", "report", "flower-app", "list", "describe"):
    assert execute([name, "--help"]) == 0
print([name for name in ("torch", "pandas", "matplotlib", "sklearn", "flwr", "optuna") if name in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


def test_every_path_is_listed_and_no_argument_of_a_method_has_the_name_of_an_option(capsys):
    assert execute(["list", "options", "--json"]) == 0
    listed = {setting["path"]: setting for setting in json.loads(capsys.readouterr().out)}
    assert {path_of(name) for name, _ in known_options().values()} <= set(listed)
    assert {path.partition(".")[0] for path in listed} >= {"rounds", "training", "partition"}
    assert all(setting["about"] and setting["allowed"] for setting in listed.values())
    told = {setting["path"]: setting["default"] for setting in listed.values()}
    assert told["seed"] == "0"
    assert {told[path_of(name)] for name in FROM_PRESET & set(TABLE)} == {"preset"}
    for name in registry:
        arguments = set(options_of(registry[name]))
        assert not arguments & set(known_options()), name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds =", "is not TOML"),
        ("round = 3", "no option 'round'"),
        ('rounds = "three"', "rounds must be an integer >= 1, got 'three'"),
        ("training = 3", "no option 'training'"),
        ("training.lrr = 3", "no option 'training.lrr'"),
        ("resume = true", "no option 'resume'"),
    ],
)
def test_a_wrong_file_is_refused(text, message, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(text)
    assert execute(["run", "fedavg", "--config", str(tmp_path / "run.toml")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_has_a_line_about_it(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["list", kind, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) >= 1
    assert all(item["about"] and "not available" not in item["about"] for item in found)
    assert execute(["list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [item["name"] for item in found]
    assert max(map(len, lines)) <= 80


def test_a_broken_plug_in_says_so_and_spoils_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(registry._table, "broken", "nowhere_at_all:method")
    assert execute(["list", "methods", "--json"]) == 0
    about = {item["name"]: item["about"] for item in json.loads(capsys.readouterr().out)}
    assert "nowhere_at_all" in about["broken"]
    assert "FedAvg" in about["fedavg"]
