"""`sparsekit flower-app DIR`: a Flower app that is ready for `flwr run`, for clients on devices."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from sparsekit.cli import command_app
from sparsekit.errors import DISTRIBUTION, InvalidValueError
from sparsekit_fl.cli.config_file import toml_of

_FILES = ("pyproject.toml", "README.md", "make_certificates.sh", "node.example.sh", "flwr-home/config.toml", ".gitignore")
# Templates that must not carry the names that have a meaning where they lie.
_SOURCES = {"pyproject.toml": "pyproject.toml.in", ".gitignore": "gitignore.in"}


def write_app(folder: Path) -> list[Path]:
    """Write the app into a folder, which is made if absent, and return its files; Flower is needed only where it runs.

    Raises:
        InvalidValueError: a file is there already; nothing was written.
    """
    # Here: help texts need no torch.
    from sparsekit_fl.deployment.plan import Plan

    taken = [name for name in _FILES if (folder / name).exists()]
    if taken:
        raise InvalidValueError(f"{folder} already holds {', '.join(taken)}; nothing was written. Choose another folder")
    here = folder.resolve()
    words = {
        "@NAME@": re.sub(r"[^a-z0-9]+", "-", here.name.lower()).strip("-") or "sparsekit-app",
        "@HERE@": here.as_posix(),
        "@DISTRIBUTION@": DISTRIBUTION,
        "@CONFIG@": "\n".join(f"{name} = {toml_of(value)}" for name, value in Plan().to_run_config().items()),
    }
    template = files("sparsekit_fl").joinpath("deployment/template")
    written = []
    for name in _FILES:
        text = template.joinpath(_SOURCES.get(name, name)).read_text(encoding="utf-8")
        for word, value in words.items():
            text = text.replace(word, value)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if name.endswith(".sh"):
            path.chmod(0o755)
        written.append(path)
    return written


def _command(*, folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder to write it to.")]) -> None:
    """Write a Flower app that runs any method on real devices: SuperLink and SuperNodes, with TLS.

    Its README has the commands, from a trial on one machine to encrypted connections with known devices only.
    """
    for path in write_app(folder):
        typer.echo(escape(str(path)))
    typer.echo(f"Next: {folder / 'README.md'} has the commands.")


flower_app = command_app(_command, examples=("sparsekit flower-app my-app",))
