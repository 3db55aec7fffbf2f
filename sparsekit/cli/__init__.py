"""Helpers for all commands: declare a command, print tables without truncated cells, and log.

For wrong input, raise `InvalidValueError` or another `SparsekitError`. `main` prints it in one line and exits with its
`exit_code`, which is 2 by default.
"""

import functools
import inspect
import json
import logging
import re
import shlex
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

INTERRUPTED = 130
"""Exit code of a program that was ended with Ctrl-C, as shells expect it."""
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]
"""The option `--json`, for commands that can print their result as JSON."""


def command_app(command: Callable[..., None], *, examples: Sequence[str]) -> typer.Typer:
    """Return a Typer app with one command, for an entry point of `sparsekit.commands`; its help ends with the examples."""

    @functools.wraps(command)
    def told(**typed: Any) -> None:
        try:
            command(**typed)
        except KeyboardInterrupt as stop:  # typer would print no message
            typer.echo(f"interrupted{': ' if stop.args else ''}{stop}", err=True)
            raise typer.Exit(INTERRUPTED) from None

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    epilog = "\n\n".join(["Examples:", *(f"$ {escape(example)}" for example in examples)])
    # Join the lines of each paragraph, so that they wrap at the width of the terminal.
    text = "\n\n".join(" ".join(part.split()) for part in (inspect.getdoc(command) or "").split("\n\n"))
    app.command(help=text, epilog=epilog, context_settings={"help_option_names": ["-h", "--help"]})(told)
    return app


def with_options(
    command: Callable[..., None], parameters: Sequence[inspect.Parameter], collect: Callable[[dict[str, Any]], dict[str, Any]]
) -> Callable[..., None]:
    """Return `command` with a signature of `parameters`, for Typer. `collect` turns their values into its keyword arguments."""

    def spread(**typed: Any) -> None:
        command(**collect(typed))

    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    spread.__doc__, spread.__name__ = command.__doc__, command.__name__
    return spread


TYPED: list[str] = []
"""The arguments of the running command, as typed."""


def command_line() -> str:
    """Return the running command as it was typed, for reports that name the command that made them."""
    return shlex.join(["sparsekit", *TYPED])


def print_json(value: object) -> None:
    """Print a value as JSON; raises ValueError for NaN and infinity, which JSON does not have."""
    typer.echo(json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False, default=str))


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, texts: Collection[str] = ()) -> None:
    """Print a table of the columns that fit the terminal, then the titles of the others, which `--json` includes.

    The first column is aligned to the left. So are columns with a title in `texts`, whose cells may wrap.
    """
    console, left_out = Console(), list[str]()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    shown, room = list[Sequence[str]](), console.width
    for title, cells in zip(head, list(zip(*rows, strict=True)), strict=True):
        lines = textwrap.wrap(title, max(10, *map(len, cells))) or [""]
        needed = (10 if title in texts else max(map(len, (*lines, *cells)))) + 2
        if left_out or (needed > room and shown):
            left_out.append(title)
            continue
        room -= needed
        right = bool(shown) and title not in texts
        table.add_column("\n".join(lines), justify="right" if right else "left", no_wrap=title not in texts, overflow="fold")
        shown.append(cells)
    for row in zip(*shown, strict=True):
        table.add_row(*map(escape, row))
    # The first column is never truncated, however narrow the terminal is.
    Console(width=max(console.width, console.width - room)).print(table)
    if left_out:
        print_wrapped(f"Too wide for this terminal, but in --json: {', '.join(left_out)}.")


def print_lines(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns. The last column wraps between words at the width of the terminal."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    for *cells, last in rows:
        text = "".join(f"{cell.ljust(width)}  " for cell, width in zip(cells, widths, strict=True))
        for line in textwrap.wrap(last, max(20, Console().width - len(text))) or [""]:
            typer.echo(text + line)
            text = " " * len(text)


def print_wrapped(text: str, *, indent: str = "") -> None:
    """Print a text, wrapped between words at the width of the terminal."""
    for line in textwrap.wrap(text, Console().width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False):
        typer.echo(line)


_ARGUMENTS = {"batches": "--dataset"} | {
    name: f"--{name.replace('_', '-')}"
    for name in ("allocation", "budget", "criterion", "exclude", "multiple_of", "prune_hidden_size", "reconstruct", "schedule")
}


def in_flags(text: str) -> str:
    """Replace names of arguments in a message by options: `batches=` by `--dataset`, `exclude=` by `--exclude`."""
    return re.sub(rf"\b({'|'.join(_ARGUMENTS)})=(?:True\b|(?!\w))", lambda found: _ARGUMENTS[found[1]], text)


def log_to(say: Callable[[str], None]) -> None:
    """From now on, send log messages of our packages, and all warnings, to a function: one line each, with its level."""
    warnings.showwarning = lambda message, *_, **__: say(f"warning: {in_flags(str(message))}")
    for package in ("sparsekit", "sparsekit_fl"):
        logger = logging.getLogger(package)
        logger.handlers, logger.propagate = [_Lines(say)], False


class _Lines(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        self._say(prefix + record.getMessage())
