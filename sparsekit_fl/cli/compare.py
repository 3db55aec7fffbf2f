"""`sparsekit compare METHOD METHOD …`: methods under one protocol, over seeds."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsekit.cli import command_app, print_json
from sparsekit.errors import InvalidValueError, MissingDependencyError, SparsekitError
from sparsekit_fl.cli.experiment import Experiment
from sparsekit_fl.cli.options import RunCommand, RunOptions, with_run_options
from sparsekit_fl.cli.report import show

if TYPE_CHECKING:
    from sparsekit_fl.methods.base import Method
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
    options: RunOptions,
) -> None:
    """Run several methods over several seeds, and print mean ± deviation.

    With --out DIR, every run has a folder in DIR: finished runs are not repeated, and interrupted ones continue. DIR also gets
    report.html, with tables and pictures; `sparsekit report DIR` writes it again.
    To use more cores, start several of these commands at once, with the same --out and other methods or seeds.
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
    grid = _grid(options, seeds)
    tasks = [_Task(method, run, options.out) for run in grid for method in made.values()]
    try:
        options.callbacks()  # if the options are wrong, nothing begins
        _experiment(grid[0])
        trials = [_ended(task, f"{number}/{len(tasks)} {task.label}") for number, task in enumerate(tasks, 1)]
    except (RunInterrupted, KeyboardInterrupt):
        kept = "nothing was kept, since there was no --out DIR" if options.out is None else "the same command line continues"
        typer.echo(f"stopped by the user; {kept}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    comparison = comparisons_of(trials, order=list(made), target=target)[0]
    end = "Nothing was kept. With --out DIR you get every result, and report.html with tables and pictures."
    if options.out is not None:
        end = f"a folder per run is in {options.out}"
        try:
            path, missing = write_report([comparison], options.out)
            end = f"{path} has tables{'' if missing else ' and pictures'}; {end}"
        except MissingDependencyError as error:
            missing = str(error)
        if missing:
            typer.echo(f"warning: {missing}; then `sparsekit report {options.out}` draws what is missing", err=True)
    if options.as_json:
        print_json(comparison.to_dict())
    else:
        show(comparison)
        typer.echo(end)
    if comparison.failed:
        raise typer.Exit(FAILED)


def _distinct(texts: Sequence[str]) -> dict[str, Method]:
    """Make each method, by its name; `all` adds those of the registry that are not named."""
    from sparsekit_fl.methods import make_method, registry
    from sparsekit_fl.paper.published import in_published_order

    made: dict[str, Method] = {}
    for method in (make_method(text) for text in texts if text != ALL):
        if method.name in made:
            raise InvalidValueError(f"method {method.name!r} was given twice; name each method once")
        made[method.name] = method
    for method in map(make_method, in_published_order(registry) if ALL in texts else ()):
        made.setdefault(method.name, method)
    return made


def _grid(options: RunOptions, seeds: int) -> list[RunOptions]:
    """Return one set of options per seed."""
    from sparsekit_fl.paper.presets import preset_for

    if seeds < 1:
        raise InvalidValueError(f"--seeds must be an integer >= 1, got {seeds}")
    first, every = options.seed or 0, options.eval_every
    if every is None:
        # Curves and times to a target need points, also in a short run.
        rounds = options.rounds or preset_for(preset=options.preset, dataset=options.dataset).rounds
        every = max(1, min(10, rounds // 10))
    return [options.replaced(seed=seed, eval_every=every, out=None) for seed in range(first, first + seeds)]


@dataclass(frozen=True, eq=False)
class _Task:
    """One trial: a method, the options with its seed, and the folder of the comparison; None keeps nothing."""

    method: Method
    options: RunOptions
    home: Path | None

    @property
    def label(self) -> str:
        """Method, level of the devices and seed, as in `fedavg, low, seed 0`."""
        return ", ".join(filter(None, (self.method.name, self.options.heterogeneity, f"seed {self.options.seed}")))

    @property
    def folder(self) -> Path | None:
        """The folder of its run, such as `fedavg-low-seed0`."""
        name, level = re.sub(r"[^\w.+-]+", "_", self.method.name), self.options.heterogeneity
        return None if self.home is None else self.home / "-".join(filter(None, (name, level, f"seed{self.options.seed}")))


@lru_cache(maxsize=1)
def _experiment(options: RunOptions) -> Experiment:
    """Load data and settings; the newest stay in memory, since neighbouring trials share them."""
    return Experiment.of(options)


def _ended(task: _Task, label: str) -> Trial:
    """Return a trial that has ended: finished before, or run now, from its last checkpoint on.

    One that fails is recorded in its folder, with the error, and stops no other.

    Raises:
        RunInterrupted, KeyboardInterrupt: it was stopped.
        ResumeError: its folder holds a trial of other settings.
        FolderInUseError: another command runs this trial.
    """
    from sparsekit_fl.callbacks import LiveProgress
    from sparsekit_fl.checkpoint import holds_run, write_atomically
    from sparsekit_fl.errors import FolderInUseError, ResumeError, RunInterrupted
    from sparsekit_fl.stored import number_text
    from sparsekit_fl.trials import TRIAL_FILE, Trial

    quiet, began, raw = task.options.quiet or task.options.as_json, time.monotonic(), dict[str, Any]()
    folder, how = task.folder, "finished"
    try:
        experiment = _experiment(task.options)
        config = {**task.method.configure(experiment.config).to_dict(), "experiment": experiment.described}
        raw |= json.loads(json.dumps({"config": config, "policies": task.method.describe()}))
        if folder is not None and (folder / "result.json").exists():
            trial, how = _finished(task, folder, raw, experiment), "finished before"
        else:
            options = task.options.replaced(out=folder)
            with LiveProgress(quiet=quiet, label=label) as progress:
                resume = folder is not None and holds_run(folder)
                result = experiment.run(task.method, options, [progress, *options.callbacks()], resume=resume)
            trial = Trial.of(result.to_dict())
            if folder is not None:
                (folder / TRIAL_FILE).unlink(missing_ok=True)
    except (FolderInUseError, ResumeError, RunInterrupted):
        raise
    except Exception as error:  # noqa: BLE001 - anybody's method may fail in any way; the other trials continue
        text = str(error) if isinstance(error, SparsekitError) else f"{type(error).__name__}: {error}"
        raw = {"config": {}, "policies": {}, **raw, "method": task.method.name, "seed": task.options.seed, "error": text}
        trial, how = Trial.of(raw), f"failed: {text}"
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / TRIAL_FILE, (json.dumps(raw, indent=1) + "\n").encode())
    accuracy = ((trial.result or {}).get("final", {}).get("personal") or {}).get("accuracy")
    parts = [how, "" if accuracy is None else f"accuracy {number_text('share', accuracy)}"]
    parts.append(number_text("seconds", time.monotonic() - began) if how == "finished" else "")
    if not quiet:
        typer.echo(f"{label}: {', '.join(filter(None, parts))}", err=True)
    return trial


def _finished(task: _Task, folder: Path, described: Mapping[str, Any], experiment: Experiment) -> Trial:
    """Read a trial that is finished, if it is the one that is wanted."""
    from sparsekit_fl.checkpoint import differences
    from sparsekit_fl.errors import ResumeError
    from sparsekit_fl.spec import data_fingerprint
    from sparsekit_fl.stored import read_result
    from sparsekit_fl.trials import Trial

    saved = read_result(folder)
    changed = differences({name: saved[name] for name in described}, described)
    if changed:
        raise ResumeError(
            f"{folder} holds {task.label} with other settings ({'; '.join(changed)});"
            " pass the options it was run with, or another --out"
        )
    if saved["fingerprint"].get("data") not in (None, data_fingerprint(experiment.clients)):
        raise ResumeError(f"{folder} holds {task.label} on other data; restore the data, or pass another --out")
    return Trial.of(saved)


compare = command_app(
    # Finished and half-finished runs are found by themselves.
    with_run_options(_compare, without=("resume", "init")),
    examples=(
        "sparsekit compare fedlps fedavg local --seeds 3",
        "sparsekit compare all --preset mnist --data-dir data --out runs/mnist",
        "sparsekit compare fedlps heterofl --preset cifar10 --heterogeneity low --target 0.7 --out runs/low",
        "sparsekit compare fedlps 'fedlps bandit=split-ucbv' --out runs/bandits",
        "sparsekit compare fedavg 'fedprox mu=0.1' 'fedprox mu=1'",
        "sparsekit compare fedlps fedper --preset mnist --set partition.lack_classes=4 --out runs/lack4",
        "sparsekit compare fedlps fedavg --config protocol.toml --out runs/protocol",
    ),
    cls=RunCommand,
)
