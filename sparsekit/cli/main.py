"""The `sparsekit` command, with the commands of `sparsekit.cli.table` and of other installed packages.

To add a command, another package declares an entry point in the group `sparsekit.commands` that names a `typer.Typer` with
one command. It is imported only to run or list that command, so its module should import little. An entry point in the group
`sparsekit.models` names a function without arguments that returns a module, or a module and its example inputs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from sparsekit.cli import INTERRUPTED, TYPED, in_flags, log_to
from sparsekit.cli.table import COMMANDS
from sparsekit.errors import InvalidValueError, SparsekitError, install_hint, nearest
from sparsekit.registry import CALLED, Registry, load_object
from sparsekit.version import __version__

commands = Registry("command", {name: listed.path for name, listed in COMMANDS.items()}, group="sparsekit.commands")
"""Name → `typer.Typer` with one command, of this project and of other packages."""


class _Commands(TyperGroup):
    """The group of all commands. A command that cannot be imported does not affect the others."""

    _summarized = False

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name and not name.startswith("-") and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {name!r}; {_meant(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help from one-line summaries, so that no command of ours is imported for it."""
        self._summarized = True
        super().format_help(ctx, formatter)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if self._summarized and cmd_name in COMMANDS:
            return click.Command(cmd_name, help=COMMANDS[cmd_name].summary)
        if cmd_name not in commands:
            return None
        try:
            found = commands[cmd_name]
            if not isinstance(found, typer.Typer):
                raise InvalidValueError(f"{cmd_name} must be a typer.Typer, got {type(found).__name__}")
            command = typer.main.get_command(found)
        except Exception as error:  # noqa: BLE001 - whatever a foreign package does must not break the other commands
            return _broken_command(cmd_name, error)
        command.name = cmd_name
        return command


def _meant(name: str, commands: Sequence[str]) -> str:
    """Return advice on an unknown command: how to run the federated method of this name, or else the nearest command."""
    with contextlib.suppress(ImportError, InvalidValueError):  # without the extra `fl` there are no methods to run
        hint = load_object("sparsekit_fl.cli.listing:method_hint")(name)
        if hint:
            return str(hint)
    return nearest(name, commands)


def _broken_command(name: str, error: Exception) -> click.Command:
    reason = f"the command {name!r} cannot be loaded: {error}; reinstall or remove the package that it comes from"
    if name in COMMANDS and isinstance(error.__cause__, ModuleNotFoundError):
        reason = f"sparsekit {name} needs {error.__cause__.name}; {install_hint(error.__cause__.name or '')}"

    def refuse(**_: Any) -> None:
        raise InvalidValueError(reason)

    return click.Command(
        name,
        callback=refuse,
        help=f"(not available: {error})",
        context_settings={"ignore_unknown_options": True},
        params=[click.Argument(["rest"], nargs=-1, type=click.UNPROCESSED)],
    )


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sparsekit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Structured pruning that verifies every removal, narrow training, and federated learning with a submodel per device."""


def execute(arguments: Sequence[str] | None = None) -> int:
    """Run `arguments`, or the process's command line. Returns 0, an error's exit code, 2 for bad input, or 130 on Ctrl-C."""
    command = typer.main.get_command(app)
    TYPED[:] = sys.argv[1:] if arguments is None else arguments
    try:
        code = command.main(None if arguments is None else list(arguments), prog_name="sparsekit", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SparsekitError as error:
        typer.echo(str(error) if error.exit_code == INTERRUPTED else f"error: {in_flags(str(error))}", err=True)
        return error.exit_code
    except OSError as error:
        typer.echo(f"error: {_in_words(error)}", err=True)
        return 2
    except click.ClickException as error:
        from typer.rich_utils import rich_format_error

        if type(error).__name__ == "NoArgsIsHelpError":  # older releases of click have no such class
            error.show()
            return 0
        rich_format_error(error)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        typer.echo("interrupted", err=True)
        return INTERRUPTED
    except Exception as error:  # raised by the user's code, or a bug of ours
        if os.environ.get("SPARSEKIT_DEBUG"):
            raise
        told, code = _blamed(error)
        typer.echo(f"error: {told}", err=True)
        return code


def _blamed(error: Exception) -> tuple[str, int]:
    """Return a sentence on what failed and the exit code: 2 for the user's code, with its innermost line, or 1 for ours."""
    frames = traceback.extract_tb(error.__traceback__)
    package = Path(__file__).parents[1]
    ours = [package, package.with_name("sparsekit_fl"), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))]
    theirs = [frame for frame in frames if not frame.filename.startswith(("<", *(f"{place}{os.sep}" for place in ours)))]
    called = next((note.removeprefix(CALLED) for note in getattr(error, "__notes__", ()) if note.startswith(CALLED)), None)
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:600]
    debug = "SPARSEKIT_DEBUG=1 shows the traceback"
    if not theirs and called is None:
        place = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else "no traceback"
        return f"sparsekit failed with {reason} ({place}). This is a mistake of ours: please report it; {debug}", 1
    where = f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""
    return f"{called or theirs[-1].name} failed with {reason}{where}; {debug}", 2


def _in_words(error: OSError) -> str:
    """Describe an error of the operating system in a sentence with advice, without the error number."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return (
        f"cannot use {os.fsdecode(error.filename)}: {error.strerror.lower()}; pass a path that exists or can be made,"
        " on a disk with room, where you may write"
    )


def main() -> None:
    """Run the console script `sparsekit`."""
    # As with `python -m`, models and data sets in the current folder are found first.
    if os.getcwd() not in sys.path[:1] and not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    # Look up sys.stderr at each message: a progress display replaces it while it draws.
    log_to(functools.partial(typer.echo, err=True))
    sys.exit(execute())
