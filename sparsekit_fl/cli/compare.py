"""`sparsekit compare METHOD METHOD …` runs methods with equal settings over seeds; `sparsekit report FOLDER…` writes tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsekit.cli import AsJson, command_app, command_line, print_json, print_table, print_wrapped
from sparsekit.errors import InvalidValueError, NoUnitsError, SparsekitError, require
from sparsekit_fl.cli.options import RunOptions, with_run_options
from sparsekit_fl.cli.run import Experiment

if TYPE_CHECKING:
    from sparsekit_fl.comparison import Comparison
    from sparsekit_fl.methods.base import Method

INTERRUPTED, FAILED = 130, 2
ALL = "all"

_AXES = "What is compared"


def _compare(
    *,
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            help="Methods by name, or package.module:Class; 'NAME PATH=VALUE …' with other options; `all` for every one."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds: --seed, --seed + 1, …", rich_help_panel=_AXES)] = 3,
    options: RunOptions,
) -> None:
    """Run several methods over several seeds, and print mean ± deviation.

    With --out DIR, every run has a folder in DIR: finished runs are not repeated, and interrupted ones continue. DIR also gets
    report.html, with tables and charts; `sparsekit report DIR` writes it again.
    To use more cores, start several of these commands at once, with the same --out and other methods or seeds.
    """
    # Training code is imported only here, so that --help is quick.
    from sparsekit_fl.comparison import comparisons_of
    from sparsekit_fl.errors import ResumeError, RunInterrupted
    from sparsekit_fl.report import write_report

    if options.engine == "flower":
        raise InvalidValueError("--engine flower is for `sparsekit run METHOD`; compare runs in processes of this machine")
    if not methods:
        raise InvalidValueError("METHODS are missing; name them, as in `sparsekit compare fedlps fedavg`")
    require("pandas")  # checked before hours of training, not afterwards
    made = _distinct(methods)
    if options.settings():
        raise InvalidValueError(
            f"--set {next(iter(options.settings()))}: not an option of a run; write an option of a method after its name, as in"
            " 'fedprox mu=0.1'"
        )
    first, finished, failed = options.seed or 0, list[Mapping[str, Any]](), list[dict[str, Any]]()
    grid = [options.replaced(seed=seed, out=None) for seed in range(first, first + seeds)]
    tasks = [(method, run) for run in grid for method in made.values()]
    try:
        options.callbacks()  # wrong options raise an error before any training
        _experiment(grid[0])
        for number, (method, run) in enumerate(tasks, 1):
            label = f"{number}/{len(tasks)} {method.name}, seed {run.seed}"
            try:
                finished.append(_result(method, run, options.out, label))
                told = "finished"
            except (ResumeError, RunInterrupted):
                raise
            except Exception as error:  # noqa: BLE001 - a method may fail in any way; the other runs continue
                text = str(error) if isinstance(error, SparsekitError) else f"{type(error).__name__}: {error}"
                told = "left out" if ALL in methods and isinstance(error, NoUnitsError) else "failed"
                failed.append({"method": method.name, "seed": run.seed, "error": text, "outcome": told})
                told = f"{told}: {text}"
            if not (options.quiet or options.as_json):
                typer.echo(f"{label}: {told}", err=True)
    except (RunInterrupted, KeyboardInterrupt):
        kept = "nothing was kept, since there was no --out DIR" if options.out is None else "the same command line continues"
        typer.echo(f"stopped by the user; {kept}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    comparisons = comparisons_of(finished, order=list(made))
    end = "Nothing was kept. With --out DIR you get every result, and report.html with tables and charts."
    lines = [f"{one['outcome']}: {one['method']}, seed {one['seed']}: {one['error']}" for one in failed]
    if options.out is not None:
        end = f"a folder per run is in {options.out}"
        if finished:
            end = f"{write_report(comparisons, options.out, command=command_line(), failed=lines)} has tables and charts; {end}"
    if options.as_json:
        print_json({**(comparisons[0].to_dict() if finished else {}), "failed": failed})
    else:
        for comparison in comparisons:
            show(comparison)
        for line in [*lines, end]:
            typer.echo(line)
    if any(one["outcome"] == "failed" for one in failed):
        raise typer.Exit(FAILED)


def _distinct(texts: Sequence[str]) -> dict[str, Method]:
    """Return name → method, for the given methods; `all` adds the other methods of the registry."""
    from sparsekit_fl.methods import make_method, registry

    made: dict[str, Method] = {}
    for method in (make_method(text) for text in texts if text != ALL):
        if method.name in made:
            raise InvalidValueError(f"method {method.name!r} was given twice; name each method once")
        made[method.name] = method
    for method in map(make_method, registry if ALL in texts else ()):
        made.setdefault(method.name, method)
    return made


@lru_cache(maxsize=1)
def _experiment(options: RunOptions) -> Experiment:
    return Experiment.of(options)


def _result(method: Method, options: RunOptions, home: Path | None, label: str) -> Mapping[str, Any]:
    """Return the result of a method in its folder below `home`, if any: finished, resumed from a checkpoint, or run now."""
    from sparsekit_fl.callbacks import LiveProgress
    from sparsekit_fl.checkpoint import holds_run

    name = re.sub(r"[^\w.+-]+", "_", "-".join(filter(None, (method.name, options.heterogeneity))))
    folder = None if home is None else home / f"{name}-seed{options.seed}"
    experiment, resume = _experiment(options), folder is not None and holds_run(folder)
    with LiveProgress(quiet=options.quiet or options.as_json, label=label) as progress:
        callbacks = [progress, *options.callbacks()]
        return experiment.run(method, options.replaced(out=folder), callbacks, resume=resume).to_dict()


compare = command_app(
    # Finished and interrupted runs are detected automatically.
    with_run_options(_compare, without=("resume", "init")),
    examples=(
        "sparsekit compare fedlps fedavg local --seeds 3",
        "sparsekit compare all --preset mnist --data-dir data --out runs/mnist",
        "sparsekit compare fedlps heterofl --preset cifar10 --heterogeneity low --out runs/low",
        "sparsekit compare fedavg 'fedprox mu=0.1' 'fedprox mu=1'",
        "sparsekit compare fedlps fedper --preset mnist --set partition.lack_classes=4 --out runs/lack4",
        "sparsekit compare fedlps fedavg --config protocol.toml --out runs/protocol",
    ),
)


def _report(
    *,
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="The --out folders of compare or run.")],
    out: Annotated[Path | None, typer.Option(help="Folder for report.html. Default: the folder itself.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write report.html of finished runs, with tables and charts, and print the tables; nothing is trained.

    Runs with different data, models or settings are in separate sections.
    """
    from sparsekit_fl.comparison import comparisons_of, read_results
    from sparsekit_fl.report import write_report

    if out is None and len(folders) > 1:
        raise InvalidValueError("a report of several folders needs a folder of its own; pass --out FOLDER")
    comparisons = comparisons_of(read_results(*folders))
    path = write_report(comparisons, out or folders[0], command=command_line())
    if as_json:
        print_json([comparison.to_dict() for comparison in comparisons])
        return
    for comparison in comparisons:
        typer.secho(comparison.title, bold=True)
        show(comparison)
    typer.echo(f"tables and charts are in {path}")


def show(comparison: Comparison) -> None:
    """Print the first columns of a comparison's table that fit the terminal, then footnotes and failures."""
    frame = comparison.table()
    print_table([frame.index.name, *frame], [(name, *cells) for name, cells in zip(frame.index, frame.values, strict=True)])
    print_wrapped(f"{comparison.seeds_text()}; wall time depends on what else ran on the machine, simulated time does not")
    for line in comparison.remarks() + comparison.troubles() + comparison.gains():
        typer.echo(line)


report = command_app(_report, examples=("sparsekit report runs/mnist", "sparsekit report runs/mnist runs/classes --out pages"))
