"""Flower from the command line: the options of its app, and `sparsekit flower-app DIR`, which writes it for devices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from sparsekit.cli import command_app
from sparsekit.errors import DISTRIBUTION, InvalidValueError
from sparsekit_fl.cli.options import RunOptions, text_of, toml_of
from sparsekit_fl.options import Count, NonNegative, options_of, read_keywords, read_settings

if TYPE_CHECKING:
    from sparsekit_fl.methods.base import Method

_FILES = ("pyproject.toml", "README.md", "make_certificates.sh", "node.example.sh", "flwr-home/config.toml", ".gitignore")
# Templates that must not carry the names that have a meaning in their folder.
_SOURCES = {"pyproject.toml": "pyproject.toml.in", ".gitignore": "gitignore.in"}
_SET = "set."
_LOCAL = ("config", "quiet", "as_json", "set")  # of the machine that starts a run


class AppOptions(RunOptions):
    """The options of a Flower app: those of `sparsekit run`, and these.

    In Flower's run configuration, which has no none and no lists, empty text stands for what was not given, and the options
    of `--set` are a table `[tool.flwr.app.config.set]`.

    Args:
        method: A method by name, or package.module:Class.
        nodes: Number of SuperNodes to wait for.
        wait_seconds: How long to wait for them.
        timeout_seconds: Give up replies that take longer; zero waits.
        error_file: File to which an error that ends the run is written.
    """

    method: str = "fedlps"
    nodes: Count = 2
    wait_seconds: NonNegative = 300.0
    timeout_seconds: NonNegative = 0.0
    error_file: Path | None = None

    @staticmethod
    def of(run_config: Mapping[str, Any]) -> AppOptions:
        """Return the options in Flower's run configuration.

        Raises:
            UnknownNameError: no such option.
            InvalidValueError: a value that is not allowed.
        """
        settings = {key: value for key, value in run_config.items() if key.startswith(_SET)}
        texts = tuple(f"{key.removeprefix(_SET)}={text_of(value)}" for key, value in settings.items())
        given = {key.replace("-", "_"): text_of(value) for key, value in run_config.items() if key not in settings}
        # Flower's numbers may be of another kind: 1.0 for 1.
        read = read_keywords(AppOptions, {name: text for name, text in given.items() if text}, name="the run configuration")
        changed = {
            name: value for name, value in read.items() if value != options_of(AppOptions)[name].default or value is None
        }
        return AppOptions(**changed, **({"set": texts} if texts else {}))

    def to_run_config(self) -> dict[str, bool | int | float | str]:
        """Return the options as Flower's run configuration; undoes `of`."""
        config: dict[str, bool | int | float | str] = {}
        for name, option in options_of(AppOptions).items():
            # None is text if it was given, and empty if it was not.
            value = getattr(self, name) if name in self.model_fields_set or option.default is not None else ""
            if name == "set":
                config |= {_SET + path: text for path, text in read_settings(value or ()).items()}
            elif name not in _LOCAL and (name != "error_file" or value):
                config[name.replace("_", "-")] = value if isinstance(value, bool | int | float) else text_of(value)
        return config

    @property
    def simulated(self) -> bool:
        """Whether this is a run of Flower's simulation, which the command line started."""
        return self.engine == "flower"

    def make_method(self) -> Method:
        """Return the method, with its options."""
        from sparsekit_fl.methods import make_method

        return make_method(self.method, settings=self.settings())


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


def write_app(folder: Path, options: AppOptions | None = None) -> list[Path]:
    """Write the app into a folder, which is made if absent, and return its files; Flower is needed only where it runs.

    Raises:
        InvalidValueError: a file is there already; nothing was written.
    """
    taken = [name for name in _FILES if (folder / name).exists()]
    if taken:
        raise InvalidValueError(f"{folder} already holds {', '.join(taken)}; nothing was written. Choose another folder")
    here = folder.resolve()
    config = (options or AppOptions()).to_run_config()
    words = {
        "@NAME@": re.sub(r"[^a-z0-9]+", "-", here.name.lower()).strip("-") or "sparsekit-app",
        "@HERE@": here.as_posix(),
        "@DISTRIBUTION@": DISTRIBUTION,
        "@CONFIG@": toml_of({name: value for name, value in config.items() if not name.startswith(_SET)}),
        "@SET@": toml_of({name[len(_SET) :]: value for name, value in config.items() if name.startswith(_SET)}),
    }
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
