"""`sparsekit report FOLDER…`: tables and the page of finished runs."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sparsekit.cli import command_app
from sparsekit.errors import InvalidValueError
from sparsekit_fl.cli.options import AsJson

if TYPE_CHECKING:
    from sparsekit_fl.comparison import Comparison


def _report(
    *,
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="The --out folders of compare or run."),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for report.html. Default: the folder itself.")] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Accuracy whose simulated time is a column, as in 0.9. Default: nine tenths of the best."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write report.html of finished runs, with tables and pictures, and print the tables; nothing is trained.

    Runs of different data, models or settings have sections of their own. Where runs have the protocol of the FedLPS paper, its
    published numbers are next to them.
    """
    from sparsekit_fl.paper.published import published_beside
    from sparsekit_fl.report import published_table, read_comparisons, write_report

    if out is None and len(folders) > 1:
        raise InvalidValueError("a report of several folders needs a folder of its own; pass --out FOLDER")
    comparisons = read_comparisons(*folders, target=target)
    path, missing = write_report(comparisons, out or folders[0])
    if as_json:
        typer.echo(json.dumps([comparison.to_dict() for comparison in comparisons], indent=1, allow_nan=False))
        return
    console = Console()
    for comparison in comparisons:
        console.print(f"[bold]{escape(comparison.title)}[/bold]", soft_wrap=True)
        show(comparison, console)
        published = published_beside(comparison)
        if published is not None:
            table = published_table(published).drop(columns=["published as", "why they differ"])
            console.print("published numbers; * differs by more than two deviations, FLOPs also by more than rounding")
            show_table(table, console)
    console.print(f"tables{'' if missing else ' and pictures'} are in {escape(str(path))}", soft_wrap=True)
    if missing:
        typer.echo(f"warning: no pictures: {missing}", err=True)


def show(comparison: Comparison, console: Console) -> None:
    """Print the table of a comparison, of the first columns that fit, then its footnotes and what failed."""
    left_out = show_table(comparison.table(), console)
    if left_out:
        console.print(f"Too wide for this terminal, but in report.html and in --json: {', '.join(left_out)}.")
    console.print(f"{comparison.seeds_text()}; wall time depends on what else ran on the machine, simulated time does not")
    for line in comparison.remarks():
        console.print(escape(line), soft_wrap=True)


def show_table(frame: Any, console: Console) -> list[str]:
    """Print a DataFrame of text, and return the titles of the columns for which the terminal is too narrow."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    shown: list[list[str]] = []
    left_out: list[str] = []
    room = console.width
    for title, cells in [(frame.index.name, list(frame.index)), *((title, list(frame[title])) for title in frame)]:
        head = textwrap.wrap(title, max(10, *map(len, cells)))
        needed = max(map(len, (*head, *cells))) + 2
        if left_out or (needed > room and shown):
            left_out.append(title)
            continue
        room -= needed
        table.add_column("\n".join(head), justify="right" if shown else "left", no_wrap=True)
        shown.append(cells)
    for row in zip(*shown, strict=True):
        table.add_row(*map(escape, row))
    console.print(table)
    return left_out


report = command_app(
    _report,
    examples=(
        "sparsekit report runs/mnist",
        "sparsekit report runs/mnist --target 0.95",
        "sparsekit report runs/mnist runs/classes --out pages",
    ),
)
