"""`sparsekit --help` is quick: it says one line of each command and imports none of them."""

import os
import subprocess
import sys

import click
import pytest
import typer

from sparsekit.cli.table import COMMANDS
from sparsekit.registry import load_object


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_help_of_every_argument_is_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = typer.main.get_command(load_object(COMMANDS[name].path))
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
    for name in COMMANDS:
        assert f" {name} " in done.stdout
