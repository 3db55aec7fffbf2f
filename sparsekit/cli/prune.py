"""`sparsekit prune`: cut a model down to a budget, from the command line."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from sparsekit.cli.model_options import CheckpointOption, DeviceOption, ExampleShapeOption, ModelArgument
from sparsekit.cli.prune_run import Job, PruneOptions, open_folder

__all__ = ["prune"]

prune = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")

_WHAT, _WHERE, _DATA, _AFTER, _RUN = "The budget", "Where it is cut", "Data", "After the cut", "The run"


@prune.command(
    cls=TyperCommand,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Examples:\n\n"
    "$ sparsekit prune vgg11 --budget flops=50% --dry-run\n\n"
    "$ sparsekit prune nets.py:make --checkpoint dense.pt --budget flops=50%,bytes=2e6 --keep stem --multiple-of 8"
    " --out small\n\n"
    "$ sparsekit prune nets.py:make --checkpoint dense.pt --budget latency_ms=4 --allocation knapsack --out fast --onnx\n\n"
    "$ sparsekit prune cnn --data mnist --data-dir data --criterion taylor --budget flops=25% --schedule cubic --steps 3"
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
    norm: Annotated[
        str, typer.Option(metavar="[fixed|kept]", help="'kept' also cuts units under layer norms.", rich_help_panel=_WHERE)
    ] = "fixed",
    criterion: Annotated[
        str | None,
        typer.Option(
            help="What a unit is worth: a name, or package.module:criterion. Default: fisher with --data, magnitude without.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    allocation: Annotated[
        str,
        typer.Option(
            help="How many units stay where: by_cost, global, isomorphic, uniform, knapsack, sensitivity, or"
            " package.module:allocation.",
            rich_help_panel=_WHERE,
        ),
    ] = "by_cost",
    table: Annotated[
        Path | None, typer.Option(help="What `sparsekit sensitivity` wrote, for that allocation.", rich_help_panel=_WHERE)
    ] = None,
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
    data: Annotated[
        str | None,
        typer.Option(
            help="A data set by name, package.module:loader or path/to/file.py:loader: batches, or (training, validation).",
            rich_help_panel=_DATA,
        ),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the data sets; without it they are fetched once.", rich_help_panel=_DATA)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Examples in a batch of a data set by name.", rich_help_panel=_DATA)] = 64,
    loss: Annotated[
        str,
        typer.Option(
            help="cross_entropy, mse_loss, …, package.module:loss, or outputs for that of the model.", rich_help_panel=_DATA
        ),
    ] = "cross_entropy",
    metric: Annotated[
        str | None,
        typer.Option(help="accuracy, loss, or package.module:metric of a model; larger is better.", rich_help_panel=_DATA),
    ] = None,
    scoring_batches: Annotated[int, typer.Option(help="Batches that a criterion scores on.", rich_help_panel=_DATA)] = 10,
    compensate: Annotated[
        bool | None,
        typer.Option(
            "--compensate/--no-compensate",
            help="Refit layers that read dropped units. Default: in one step and with data.",
            rich_help_panel=_AFTER,
        ),
    ] = None,
    recalibrate: Annotated[
        bool, typer.Option(help="Estimate statistics of batch norms anew, where there are data.", rich_help_panel=_AFTER)
    ] = True,
    epochs: Annotated[int, typer.Option(help="Of fine-tuning, after every step.", rich_help_panel=_AFTER)] = 0,
    lr: Annotated[float, typer.Option(help="Learning rate of fine-tuning at its start.", rich_help_panel=_AFTER)] = 0.01,
    distill: Annotated[
        float, typer.Option(help="Share of the dense model's outputs in the loss, in [0, 1].", rich_help_panel=_AFTER)
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.", rich_help_panel=_RUN)] = 0,
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
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.", rich_help_panel=_RUN)] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON on stdout and nothing else.", rich_help_panel=_RUN)
    ] = False,
) -> None:
    """Cut a model down to a budget, which is never exceeded, and say what came of it.

    A factory is called without arguments and returns the module, or the module and its example inputs. A loader may take
    data_dir, batch_size and seed.
    """
    options = PruneOptions(
        model=model, budget=tuple(budget), checkpoint=checkpoint, example_shape=tuple(example_shape or ()), device=device,
        norm=norm, criterion=criterion, allocation=allocation, table=table, keep=tuple(keep or ()), limit=tuple(limit or ()),
        multiple_of=tuple(multiple_of or ()), schedule=schedule, steps=steps, data=data, data_dir=data_dir,
        batch_size=batch_size, loss=loss, metric=metric, scoring_batches=scoring_batches, compensate=compensate,
        recalibrate=recalibrate, epochs=epochs, lr=lr, distill=distill, seed=seed, out=out, onnx=onnx, resume=resume,
    )  # fmt: skip
    from sparsekit.tracing.trace import FixedUnitsWarning

    shown = not quiet and not as_json and sys.stderr.isatty()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FixedUnitsWarning)  # the report has the same facts
        if dry_run:
            report = Job(options, progress=shown).decide(cut=False).report.to_dict()
        else:
            job = Job(options, progress=shown)
            finished = open_folder(options)
            if finished is None:
                done = job.finish(job.decide())
                report = {**done.report.to_dict(), "files": job.write(done)}
            else:
                report = finished
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        print_report(report, dry_run=dry_run)
        if out is None and not dry_run:
            typer.echo("nothing was written; pass --out FOLDER to keep the small model")


def print_report(report: dict[str, Any], *, dry_run: bool = False) -> None:
    """Print the tables of a report.

    Args:
        report: As JSON data.
        dry_run: Whether nothing was done.
    """
    from sparsekit.measure.budget import format_cost

    console = Console()
    title = f"{report['model']}: criterion {report['criterion']}, allocation {report['allocation']}"
    console.print(escape(title + (", dry run: nothing was cut" if dry_run else "")))
    costs = Table()
    costs.add_column("metric", no_wrap=True, min_width=10)

    def told(name: str, value: float) -> str:
        return format_cost(name, value).removesuffix("FLOPs").rstrip()  # the row has the name already

    for column in ("before", "after", "share", "asked", "least"):
        costs.add_column(column, justify="right", no_wrap=True)
    for name, before in report["before"].items():
        after, limit, least = report["after"][name], report["limits"].get(name), report["least"].get(name)
        costs.add_row(
            name,
            told(name, before),
            told(name, after),
            f"{after / before:.1%}" if before else "",
            "" if limit is None else f"≤ {told(name, limit)}",
            "" if least is None else told(name, least),
        )
    console.print(costs)
    groups = Table("group", "kind")
    for column in ("before", "after", "share", "FLOPs it touches"):
        groups.add_column(column, justify="right", no_wrap=True)
    for group in report["groups"]:
        groups.add_row(
            escape(group["name"]),
            group["kind"],
            str(group["before"]),
            str(group["after"]),
            f"{group['after'] / group['before']:.0%}",
            f"{format_cost('flops', group['flops_before'])} → {format_cost('flops', group['flops_after'])}",
        )
    console.print(groups)
    if report["fixed"]:
        console.print(f"{len(report['fixed'])} more are kept whole; `sparsekit units` says why")
    for name, value in report["measured"].items():
        console.print(escape(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}"))
    for note in report["notes"]:
        console.print(escape(note))
    for what, path in report.get("files", {}).items():
        console.print(escape(f"{what}: {path}"), soft_wrap=True)
