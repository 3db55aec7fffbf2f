"""`sparsekit --help` is quick: it says one line of each command and imports none of them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points

import click
import pytest
import typer

from sparsekit.cli.main import COMMANDS_GROUP, SUMMARIES_GROUP, app
from sparsekit.registry import load_object

SUMMARIES = {name: text for point in entry_points(group=SUMMARIES_GROUP) for name, text in point.load().items()}
OURS = {
    point.name: point.value
    for point in entry_points(group=COMMANDS_GROUP)
    if point.value.startswith(("sparsekit.", "sparsekit_fl."))
}


@pytest.mark.parametrize("name", sorted(OURS))
def test_the_summary_of_a_command_is_the_first_line_of_its_help(name: str) -> None:
    command = typer.main.get_command(load_object(OURS[name]))
    first = (command.help or "").split("\n\n")[0]
    assert SUMMARIES.get(name) == " ".join(first.split()), "write this line in cli/summaries.py"


@pytest.mark.parametrize("name", [*sorted(OURS), "units"])
def test_the_help_of_every_argument_is_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = typer.main.get_command(app if name == "units" else load_object(OURS[name]))
    if isinstance(command, click.Group):
        command = command.commands[name]
    with pytest.raises(SystemExit):
        command.main(["--help"], prog_name=name)
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    assert all(getattr(param, "help", None) for param in arguments)
    for param in arguments:
        assert " ".join(param.help.split()[:4]) in printed


def test_help_imports_no_torch_numpy_or_pydantic_and_lists_every_command() -> None:
    code = (
        "import sys\nfrom sparsekit.cli.main import execute\nassert execute(['--help']) == 0\n"
        "print([name for name in ('torch', 'numpy', 'pydantic', 'sparsekit.bandit') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert done.stdout.rstrip().endswith("[]")
    assert set(OURS) == set(SUMMARIES)
    for name in OURS:
        assert f" {name} " in done.stdout
