"""Flower from the command line: the options of its app, and `sparsekit flower-app DIR`, which writes it for devices."""

import json
import re
import shlex
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from sparsekit.cli import command_app
from sparsekit.errors import InvalidValueError
from sparsekit_fl.cli.options import MOMENTARY, RunOptions, path_of, text_of
from sparsekit_fl.config import read_settings

_FILES = ("pyproject.toml", "README.md", "make_certificates.sh", "node.example.sh", "flwr-home/config.toml", ".gitignore")
# Templates that must not carry the names that have a meaning in their folder.
_SOURCES = {"pyproject.toml": "pyproject.toml.in", ".gitignore": "gitignore.in"}


DEFAULTS: dict[str, Any] = {
    "run": "fedlps", "resume": False, "nodes": 2, "wait-seconds": 300.0, "timeout-seconds": 0.0, "error-file": ""
}  # fmt: skip
"""The run configuration of the app; its pyproject.toml says what each option means."""


def parsed(run_config: Mapping[str, Any]) -> tuple[str, RunOptions]:
    """Undo `run_text` for a run configuration: return the method, as the user wrote it, and the options of the run."""
    method, *settings = shlex.split(run_config["run"]) or [""]
    return method, RunOptions.read(read_settings(settings), resume=run_config["resume"])


def run_text(method: str, given: Mapping[str, Any]) -> str:
    settings = [f"{path_of(name)}={text_of(value)}" for name, value in given.items() if name not in (*MOMENTARY, "set")]
    return shlex.join([method, *settings, *(given.get("set") or ())])


def client_ids(text: str) -> list[int]:
    """Return ids from "3", "0-3" or "0-3,7,9"; raises InvalidValueError if it names none, one twice, or is malformed."""
    ids: list[int] = []
    try:
        for part in str(text).split(","):
            low, dash, high = part.strip().partition("-")
            ids += range(int(low), int(high) + 1) if dash else [int(low)]
    except ValueError:
        raise InvalidValueError(f"clients must be ids such as 3, 0-3 or 0-3,7, got {text!r}") from None
    if not ids or len(set(ids)) != len(ids):
        raise InvalidValueError(f"clients must name at least one id, and none twice, got {text!r}")
    return ids


def write_app(folder: Path, config: Mapping[str, Any] | None = None, *, port: int = 8000) -> list[Path]:
    """Write the app into a folder, and return its files; if one is there already, raise InvalidValueError and write nothing."""
    taken = [name for name in _FILES if (folder / name).exists()]
    if taken:
        raise InvalidValueError(f"{folder} already holds {', '.join(taken)}; nothing was written. Choose another folder")
    here = folder.resolve()
    words = {
        "@NAME@": re.sub(r"[^a-z0-9]+", "-", here.name.lower()).strip("-") or "sparsekit-app",
        "@HERE@": here.as_posix(),
        "@PORT@": str(port),
    }
    # Of these kinds, JSON and TOML have the same.
    words |= {f"@{name}@": json.dumps(value) for name, value in {**DEFAULTS, **(config or {})}.items()}
    template = files("sparsekit_fl").joinpath("flower/template")
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
