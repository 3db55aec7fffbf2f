"""`sparsekit compare METHOD METHOD …`: methods under one protocol, over seeds and levels of heterogeneity."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from sparsekit.cli import command_app
from sparsekit.errors import InvalidValueError, MissingDependencyError
from sparsekit_fl.cli.experiment import cores
from sparsekit_fl.cli.options import DefaultsCommand, RunOptions, with_run_options
from sparsekit_fl.cli.report import show
from sparsekit_fl.options import parse_value

if TYPE_CHECKING:
    from sparsekit_fl.trials import Trial

INTERRUPTED, FAILED = 130, 2
ALL = "all"

_AXES = "What is compared"


def _compare(
    *,
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            help="Methods by name, or package.module:function; 'NAME PATH=VALUE …' with other options; `all` for every one."
            " Or --config FILE names them."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds: --seed, --seed + 1, …", rich_help_panel=_AXES)] = 3,
    target: Annotated[
        float | None,
        typer.Option(
            help="Accuracy whose simulated time is a column, as in 0.9. Default: nine tenths of the best.",
            rich_help_panel=_AXES,
        ),
    ] = None,
    heterogeneity: Annotated[
        list[str] | None,
        typer.Option(help="Levels of the devices: low, median, high; several by commas.", rich_help_panel=_AXES),
    ] = None,
    lack_classes: Annotated[
        list[str] | None,
        typer.Option(help="Number of classes every client lacks; several by commas, as in 2,4,6,8.", rich_help_panel=_AXES),
    ] = None,
    jobs: Annotated[
        int, typer.Option(help="Runs at a time, each with --workers processes.", rich_help_panel="How it is run")
    ] = 1,
    options: RunOptions,
) -> None:
    """Run several methods over several seeds, and print mean ± deviation.

    With --out DIR, every run has a folder in DIR: finished runs are not repeated, and interrupted ones continue. DIR also gets
    report.html, with tables and pictures; `sparsekit report DIR` writes it again.
    Clients are evaluated ten times in a run, at least every 10 rounds, unless --eval-every is given.
    """
    # What trains is imported only now, so that --help is quick.
    from sparsekit_fl.comparison import check_target, comparisons_of
    from sparsekit_fl.errors import RunInterrupted, need
    from sparsekit_fl.report import write_report

    if options.engine == "flower":
        raise InvalidValueError("--engine flower is for `sparsekit run METHOD`; compare runs in processes of this machine")
    if not methods:
        raise InvalidValueError("METHODS are missing; name them, as in `sparsekit compare fedlps fedavg`")
    check_target(target)
    need("pandas")  # before hours of training, and not behind them
    made = _distinct(methods)
    if options.settings():
        raise InvalidValueError(
            f"--set {next(iter(options.settings()))}: no option of a run; those of a method stand behind its name, as in"
            " 'fedprox mu=0.1'"
        )
    if jobs < 1:
        raise InvalidValueError(f"--jobs must be an integer >= 1, got {jobs}")
    grid = _grid(options, seeds, heterogeneity, lack_classes, jobs)
    try:
        trials = _run(made, grid, options.out, jobs=jobs, quiet=options.quiet or options.json)
    except (RunInterrupted, KeyboardInterrupt) as error:
        found = re.match(r"stopped by the user after round \d+ of \d+", str(error))
        kept = "nothing was kept, since there was no --out DIR" if options.out is None else "the same command line goes on"
        typer.echo(f"{found[0] if found else 'stopped by the user'}; {kept}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    comparison = comparisons_of(trials, order=list(made), target=target)[0]
    end = "Nothing was kept. With --out DIR you get every result, and report.html with tables and pictures."
    if options.out is not None:
        end = f"a folder per run is in {escape(str(options.out))}"
        try:
            path, missing = write_report([comparison], options.out)
            end = f"{escape(str(path))} has tables{'' if missing else ' and pictures'}; {end}"
        except MissingDependencyError as error:
            missing = str(error)
        if missing:
            typer.echo(f"warning: {missing}; then `sparsekit report {options.out}` draws what is missing", err=True)
    if options.json:
        typer.echo(json.dumps(comparison.to_dict(), indent=1, allow_nan=False))
    else:
        console = Console()
        show(comparison, console)
        console.print(end, soft_wrap=True)
    if comparison.failed:
        raise typer.Exit(FAILED)


def _distinct(texts: Sequence[str]) -> dict[str, str]:
    """Map each method's name to the text it was given as; `all` adds those of the registry that are not named."""
    from sparsekit_fl.methods import registry
    from sparsekit_fl.methods.make import make_method
    from sparsekit_fl.paper.published import in_published_order

    made: dict[str, str] = {}
    for text in texts:
        if text == ALL:
            continue
        name = make_method(text).name
        if name in made:
            raise InvalidValueError(f"method {name!r} was given twice; name each method once")
        made[name] = text
    for text in in_published_order(registry) if ALL in texts else ():
        made.setdefault(make_method(text).name, text)
    return made


def _grid(
    options: RunOptions, seeds: int, heterogeneity: Sequence[str] | None, lack_classes: Sequence[str] | None, jobs: int
) -> list[RunOptions]:
    """Return one set of options per level and seed."""
    from sparsekit_fl.paper.presets import preset_for

    if seeds < 1:
        raise InvalidValueError(f"--seeds must be an integer >= 1, got {seeds}")
    first, every, workers = options.seed or 0, options.eval_every, options.workers
    if every is None:
        # Curves and times to a target need points, also in a short run.
        rounds = options.rounds or preset_for(preset=options.preset, dataset=options.dataset).rounds
        every = max(1, min(10, rounds // 10))
    if workers is None and jobs > 1:
        workers = max(1, cores() // jobs)
    return [
        options.replaced(heterogeneity=level, lack_classes=lack, seed=seed, workers=workers, eval_every=every, out=None)
        for level in _listed(heterogeneity, "--heterogeneity", str) or [options.heterogeneity]
        for lack in _listed(lack_classes, "--lack-classes", int) or [options.lack_classes]
        for seed in range(first, first + seeds)
    ]


def _listed(texts: Sequence[str] | None, flag: str, kind: type) -> list[Any]:
    """Split an option that may be repeated and may hold commas."""
    values = [parse_value(kind, part, name=flag) for text in texts or () for part in text.split(",")]
    if len(set(values)) < len(values):
        raise InvalidValueError(f"{flag} has a value twice: {','.join(map(str, values))}")
    return values


def _folder(name: str, options: RunOptions) -> str:
    lack = "" if options.lack_classes is None else f"-lack{options.lack_classes}"
    level = "" if options.heterogeneity is None else f"-{options.heterogeneity}"
    return re.sub(r"[^\w.+-]+", "_", name) + f"{level}{lack}-seed{options.seed}"


def _run(methods: dict[str, str], grid: Sequence[RunOptions], out: Path | None, *, jobs: int, quiet: bool) -> list[Trial]:
    from sparsekit_fl.cli.progress import TrialsProgress
    from sparsekit_fl.cli.trials import Task, run_trials

    tasks = [
        Task(method=text, name=name, options=options, folder=None if out is None else out / _folder(name, options))
        for options in grid
        for name, text in methods.items()
    ]
    # Closed here and not when it is collected, so that no process outlives the command.
    with TrialsProgress(len(tasks), quiet=quiet) as board, closing(run_trials(tasks, board, jobs=jobs)) as running:
        return list(running)


compare = command_app(
    # Finished and half-finished runs are found by themselves.
    with_run_options(_compare, without=("resume", "init"), hidden=("deterministic",)),
    examples=(
        "sparsekit compare fedlps fedavg local --seeds 3",
        "sparsekit compare all --preset mnist --data-dir data --out runs/mnist",
        "sparsekit compare fedlps heterofl --preset cifar10 --heterogeneity low,median,high --target 0.7 --out runs/levels",
        "sparsekit compare fedlps 'fedlps bandit=split-ucbv' --out runs/bandits",
        "sparsekit compare fedavg 'fedprox mu=0.1' 'fedprox mu=1'",
        "sparsekit compare fedlps fedper --preset mnist --lack-classes 2,4,6,8 --jobs 2 --out runs/classes",
        "sparsekit compare fedlps fedavg --config protocol.toml --out runs/protocol",
    ),
    cls=DefaultsCommand,
)
