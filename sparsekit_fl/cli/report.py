"""`sparsekit report FOLDER…`: tables and the page of finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsekit.cli import AsJson, command_app, command_line, print_json, print_table, print_wrapped
from sparsekit.errors import InvalidValueError

if TYPE_CHECKING:
    from sparsekit_fl.comparison import Comparison


def _report(
    *,
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="The --out folders of compare or run.")],
    out: Annotated[Path | None, typer.Option(help="Folder for report.html. Default: the folder itself.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write report.html of finished runs, with tables and charts, and print the tables; nothing is trained.

    Runs of different data, models or settings have sections of their own. Where runs have the protocol of the FedLPS paper, its
    published numbers are next to them.
    """
    from sparsekit_fl.comparison import comparisons_of, read_results
    from sparsekit_fl.paper.published import RULE, in_published_order, published_beside
    from sparsekit_fl.report import published_table, write_report

    if out is None and len(folders) > 1:
        raise InvalidValueError("a report of several folders needs a folder of its own; pass --out FOLDER")
    results = read_results(*folders)
    comparisons = comparisons_of(results, order=in_published_order(dict.fromkeys(one["method"] for one in results)))
    path = write_report(comparisons, out or folders[0], command=command_line())
    if as_json:
        print_json([comparison.to_dict() for comparison in comparisons])
        return
    for comparison in comparisons:
        typer.secho(comparison.title, bold=True)
        show(comparison)
        published = published_beside(comparison)
        if published is not None:
            print_wrapped(f"Published numbers. {RULE}")
            _show_frame(published_table(published).drop(columns=["published as", "why they differ"]))
    typer.echo(f"tables and charts are in {path}")


def show(comparison: Comparison) -> None:
    """Print the table of a comparison, of the first columns that fit, then its footnotes and what failed."""
    _show_frame(comparison.table())
    print_wrapped(f"{comparison.seeds_text()}; wall time depends on what else ran on the machine, simulated time does not")
    for line in comparison.remarks() + comparison.troubles():
        typer.echo(line)


def _show_frame(frame: Any) -> None:
    print_table([frame.index.name, *frame], [(name, *cells) for name, cells in zip(frame.index, frame.values, strict=True)])


report = command_app(_report, examples=("sparsekit report runs/mnist", "sparsekit report runs/mnist runs/classes --out pages"))
