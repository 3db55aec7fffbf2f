"""What the commands share towards a terminal: how one is declared, tables in which nothing is cut off, and the log."""

import logging
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand


def command_app(
    command: Callable[..., None], *, examples: Sequence[str], cls: type[TyperCommand] = TyperCommand
) -> typer.Typer:
    """Return a Typer app with one command, as the entry points of `sparsekit.commands` want it; its help ends with the
    examples.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    epilog = "\n\n".join(["Examples:", *(f"$ {escape(example)}" for example in examples)])
    app.command(cls=cls, epilog=epilog, context_settings={"help_option_names": ["-h", "--help"]})(command)
    return app


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, texts: Collection[str] = ()) -> None:
    """Print a table; where the terminal is too narrow for its names and numbers, it grows wider than that.

    Args:
        head: Titles of the columns; all but the first stand to the right.
        rows: A cell for each column.
        texts: Titles of columns to the left whose cells may wrap.
    """
    console, table, cells = Console(), Table(), [list(map(escape, row)) for row in rows]
    for place, title in enumerate(head):
        if title in texts:
            table.add_column(title, overflow="fold")
        else:
            whole = max(cell_len(text) for text in (title, *(row[place] for row in cells)))
            table.add_column(title, justify="right" if place else "left", no_wrap=True, min_width=whole)
    for row in cells:
        table.add_row(*row)
    least = console.measure(table, options=console.options.update(max_width=10_000)).minimum
    Console(width=max(console.width, least)).print(table)


def print_lines(rows: Sequence[Sequence[str]]) -> None:
    """Print one line per row, in columns; the last one is cut at a word where the terminal ends."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    for *cells, last in rows:
        text = "".join(f"{cell.ljust(width)}  " for cell, width in zip(cells, widths, strict=True))
        typer.echo(text + textwrap.shorten(last, max(20, Console().width - len(text)), placeholder="…"))


def log_to(say: Callable[[str], None]) -> None:
    """Hand the log messages of our packages, and all warnings, to a function from now on: a line each, with its kind."""
    warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
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
