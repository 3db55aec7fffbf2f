"""`sparsekit prune`: cut a model down to a budget, from the command line."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from sparsekit.cli.model_options import (
    BatchSizeOption,
    CheckpointOption,
    DataDirOption,
    DataOption,
    DeviceOption,
    ExampleShapeOption,
    JsonOption,
    LossOption,
    MetricOption,
    ModelArgument,
    NormOption,
    QuietOption,
    ScoringBatchesOption,
    SeedOption,
)
from sparsekit.cli.prune_run import Job, PruneOptions, open_folder

if TYPE_CHECKING:
    from sparsekit.pruning.report import PruneReport

prune = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")

_WIDTH = 100
"""Columns of a terminal that the tables need at least: names and numbers are never cut."""
_WHAT, _WHERE, _AFTER, _RUN = "The budget", "Where it is cut", "After the cut", "The run"


@prune.command(
    cls=TyperCommand,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Examples:\n\n"
    "$ sparsekit prune vgg11 --budget flops=50% --dry-run\n\n"
    "$ sparsekit prune nets.py:make --checkpoint dense.pt --budget flops=50%,bytes=2e6 --keep stem --multiple-of 8"
    " --out small\n\n"
    "$ sparsekit prune nets.py:make --checkpoint dense.pt --budget latency_ms=4 --allocation knapsack --out fast --onnx\n\n"
    "$ sparsekit prune cnn --dataset mnist --data-dir data --criterion taylor --budget flops=25% --schedule cubic --steps 3"
    " --epochs 2 --distill 0.5 --out small",
)
def _prune(
    model: ModelArgument,
    budget: Annotated[
        list[str],
        typer.Option(
            help="METRIC=VALUE: flops, params, bytes, memory or latency_ms; 50% is a share, a number is absolute. Several with"
            " commas between, or the option several times.",
            rich_help_panel=_WHAT,
        ),
    ],
    checkpoint: CheckpointOption = None,
    example_shape: ExampleShapeOption = None,
    device: DeviceOption = "cpu",
    norm: NormOption = "fixed",
    criterion: Annotated[
        str | None,
        typer.Option(
            help="What a unit is worth: a name, or package.module:criterion. Default: fisher with data, magnitude without.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    allocation: Annotated[
        str,
        typer.Option(
            help="How many units stay where: by_cost, global, isomorphic, uniform, knapsack, package.module:allocation, or"
            " sensitivity=FILE with what `sparsekit sensitivity` wrote.",
            rich_help_panel=_WHERE,
        ),
    ] = "by_cost",
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Layer that keeps all its units: a name or a regular expression.", rich_help_panel=_WHERE),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(help="LAYER=LEAST:LARGEST share of its units that stays, as in layer1=0.5:1.", rich_help_panel=_WHERE),
    ] = None,
    multiple_of: Annotated[
        list[str] | None,
        typer.Option(help="Widths are multiples of this number; or KIND=number, as in head=2.", rich_help_panel=_WHERE),
    ] = None,
    schedule: Annotated[
        str, typer.Option(metavar="[one_shot|linear|cubic|cosine]", help="Way to the budget.", rich_help_panel=_AFTER)
    ] = "one_shot",
    steps: Annotated[int, typer.Option(help="Steps of the way, with fine-tuning after each.", rich_help_panel=_AFTER)] = 1,
    dataset: DataOption = None,
    data_dir: DataDirOption = None,
    batch_size: BatchSizeOption = 64,
    loss: LossOption = "cross_entropy",
    metric: MetricOption = None,
    scoring_batches: ScoringBatchesOption = 10,
    repair: Annotated[
        str | None,
        typer.Option(
            metavar="[compensate|recalibrate|both|none]",
            help="After every step: refit layers that read dropped units, estimate statistics of batch norms anew, or both."
            " Default: both, where there are data.",
            rich_help_panel=_AFTER,
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(help="Of fine-tuning, after every step.", rich_help_panel=_AFTER)] = 0,
    lr: Annotated[float, typer.Option(help="Learning rate of fine-tuning at its start.", rich_help_panel=_AFTER)] = 0.01,
    distill: Annotated[
        float, typer.Option(help="Share of the dense model's outputs in the loss, in [0, 1].", rich_help_panel=_AFTER)
    ] = 0.0,
    seed: SeedOption = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the compact model, report.html and report.json; none writes nothing.", rich_help_panel=_RUN
        ),
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Also write model.onnx.", rich_help_panel=_RUN)] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be cut, and do nothing.", rich_help_panel=_RUN)
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out, from the last epoch.", rich_help_panel=_RUN)
    ] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Cut a model down to a budget, which is never exceeded, and say what came of it.

    A factory is called without arguments and returns the module, or the module and its example inputs. A loader may take
    data_dir, batch_size and seed.
    """
    options = PruneOptions.of(locals())
    from sparsekit.pruning.report import PruneReport
    from sparsekit.tracing.trace import FixedUnitsWarning

    shown = not quiet and not as_json and sys.stderr.isatty()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedUnitsWarning)  # the report has the same facts
        job = Job(options, progress=shown)
        files: dict[str, str] = {}
        if dry_run:
            report = job.decide(cut=False).report
        elif (finished := open_folder(options)) is not None:
            report, files = PruneReport.from_dict(finished), finished["files"]
        else:
            done = job.finish(job.decide())
            report, files = done.report, job.write(done)
    if as_json:
        typer.echo(json.dumps({**report.to_dict(), **({} if dry_run else {"files": files})}, indent=1))
        return
    _print(report, ", dry run: nothing was cut" if dry_run else "")
    for what, path in files.items():
        typer.echo(f"{what}: {path}")
    if out is None and not dry_run:
        typer.echo("nothing was written; pass --out FOLDER to keep the small model")


def _print(report: PruneReport, how: str) -> None:
    console = Console()
    console.print(escape(f"{report.model}: criterion {report.criterion}, allocation {report.allocation}{how}"))
    tables = report.tables()
    for title in ("Costs", "Groups", "Measured"):
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
