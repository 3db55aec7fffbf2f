"""`sparsekit prune`: cut a model down to a budget, from the command line."""

from __future__ import annotations

import json
import sys
import warnings
from typing import TYPE_CHECKING

import typer

from sparsekit.cli.model_options import PruneOptions, takes
from sparsekit.cli.output import command_app, print_table
from sparsekit.cli.prune_run import PruneJob, open_folder

if TYPE_CHECKING:
    from sparsekit.pruning.report import PruneReport


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
    typer.echo(f"{report.model}: criterion {report.criterion}, allocation {report.allocation}{how}")
    tables = report.tables()
    for title in ("Costs", "Groups", "Time", "Most time", "Measured"):
        head, rows = tables.get(title, ((), ()))
        shown = [column for column in head if column != "parameters it touches"]  # the page has them
        if rows:
            print_table(shown, [row[: len(shown)] for row in rows])
    if report.fixed:
        typer.echo(f"{len(report.fixed)} more are kept whole; `sparsekit units` says why")
    for note in report.notes:
        typer.echo(note)


prune = command_app(
    _prune,
    examples=(
        "sparsekit prune vgg11 --budget flops=50% --dry-run",
        "sparsekit prune nets.py:make --init dense.pt --budget flops=50%,bytes=2e6 --keep stem --multiple-of 8 --out small",
        "sparsekit prune nets.py:make --init dense.pt --budget latency_ms=4 --allocation knapsack --out fast --onnx",
        "sparsekit prune cnn --dataset mnist --data-dir data --criterion taylor --budget flops=25% --schedule cubic=3"
        " --epochs 2 --distill 0.5 --out small",
    ),
)
