"""`sparsekit prune`: cut a model down to a budget, from the command line."""

from __future__ import annotations

import json
import sys
import warnings
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from sparsekit.cli.model_options import PruneOptions, takes
from sparsekit.cli.prune_run import PruneJob, open_folder

if TYPE_CHECKING:
    from sparsekit.pruning.report import PruneReport

prune = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")

_WIDTH = 100
"""Columns of a terminal that the tables need at least: names and numbers are never cut."""


@prune.command(
    cls=TyperCommand,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Examples:\n\n"
    "$ sparsekit prune vgg11 --budget flops=50% --dry-run\n\n"
    "$ sparsekit prune nets.py:make --init dense.pt --budget flops=50%,bytes=2e6 --keep stem --multiple-of 8"
    " --out small\n\n"
    "$ sparsekit prune nets.py:make --init dense.pt --budget latency_ms=4 --allocation knapsack --out fast --onnx\n\n"
    "$ sparsekit prune cnn --dataset mnist --data-dir data --criterion taylor --budget flops=25% --schedule cubic=3"
    " --epochs 2 --distill 0.5 --out small",
)
@takes(PruneOptions)
def _prune(options: PruneOptions) -> None:
    """Cut a model down to a budget, and report what was cut.

    A factory is called without arguments and returns the module, or the module and its example inputs. A loader may take
    data_dir, batch_size and seed.
    """
    from sparsekit.pruning.report import PruneReport
    from sparsekit.tracing.trace import FixedUnitsWarning

    shown = not options.quiet and not options.as_json and sys.stderr.isatty()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedUnitsWarning)  # the report has the same facts
        job = PruneJob(options, progress=shown)
        files: dict[str, str] = {}
        if options.dry_run:
            report = job.decide(cut=False).report
        elif (finished := open_folder(options)) is not None:
            report, files = PruneReport.from_dict(finished), finished["files"]
        else:
            done = job.finish(job.decide())
            report, files = done.report, job.write(done)
    if options.as_json:
        typer.echo(json.dumps({**report.to_dict(), **({} if options.dry_run else {"files": files})}, indent=1))
        return
    _print(report, ", dry run: nothing was cut" if options.dry_run else "")
    for what, path in files.items():
        typer.echo(f"{what}: {path}")
    if options.out is None and not options.dry_run:
        typer.echo("nothing was written; pass --out FOLDER to keep the small model")


def _print(report: PruneReport, how: str) -> None:
    console = Console()
    console.print(escape(f"{report.model}: criterion {report.criterion}, allocation {report.allocation}{how}"))
    tables = report.tables()
    for title in ("Costs", "Groups", "Time", "Most time", "Measured"):
        head, rows = tables.get(title, ((), ()))
        if not rows:
            continue
        shown = Table()
        for place, column in enumerate(head):
            if column != "parameters it touches":  # the page has them
                shown.add_column(column, justify="right" if place else "left", no_wrap=place > 0)
        for row in rows:
            shown.add_row(*map(escape, row[: len(shown.columns)]))
        Console(width=max(console.width, _WIDTH)).print(shown)
    if report.fixed:
        console.print(f"{len(report.fixed)} more are kept whole; `sparsekit units` says why")
    for note in report.notes:
        console.print(escape(note))
