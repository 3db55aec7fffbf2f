"""`sparsekit tune`: tune numbers in any command line."""

from __future__ import annotations

import shlex
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from sparsekit.bandit.axes import parse_axes
from sparsekit.bandit.make import DEFAULT, registry
from sparsekit.cli.commands import CommandLine, Commands, Metric
from sparsekit.errors import InvalidValueError

_DEFAULTS: dict[str, Any] = {"maximize": True, "sampler": DEFAULT, "seed": 0, "deterministic": False}
_NEEDED = {"command": "a command in quotes", "space": "--space NAME=LOW:HIGH", "metric": "--metric REGEX"}
_TRIALS = 30

tune = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@tune.command(
    cls=TyperCommand,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Examples:\n\n"
    "$ sparsekit tune \"python train.py --lr {lr}\" --space lr=1e-4:1e-1:log --metric 'accuracy: (\\S+)'\n\n"
    '$ sparsekit tune "./bench --pool {pool} --mode {mode}" --space pool=1:64:log:int --space mode=fast,safe'
    " --metric 'ms: (\\S+)' --minimize --trials 60 --out runs/bench\n\n"
    "$ sparsekit tune --resume --out runs/bench --trials 90",
)
def _tune(
    command: Annotated[
        str | None,
        typer.Argument(help="Shell command, in quotes, with {NAME} where a value goes, and {trial} for the trial's number."),
    ] = None,
    space: Annotated[
        list[str] | None,
        typer.Option(help="NAME=LOW:HIGH (behind it :log, :int or both) or NAME=A,B,C. Once per name."),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="Regular expression with one group around the number; the last match in the output counts."),
    ] = None,
    maximize: Annotated[
        bool | None, typer.Option("--maximize/--minimize", help="Whether more is better. Default: --maximize.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help=f"Number of trials, those of earlier calls included. Default: {_TRIALS}.")
    ] = None,
    sampler: Annotated[
        str | None,
        typer.Option(
            help=f"What chooses values: a bandit ({', '.join(registry)}, or package.module:object), tpe, random or grid."
            f" Default: {DEFAULT}."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed of the sampler. Default: 0.")] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option(
            "--deterministic", help="Equal command lines give equal metrics: run none of them twice.", show_default=False
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Trials at a time.")] = 1,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which a trial is ended and has failed.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the trials, their output and a picture.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the search in --out; nothing else need be given again.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")] = False,
) -> None:
    """Tune numbers and choices in any command line: a bandit chooses them, and a regular expression reads the score.

    A trial has failed when its exit code is not 0, its output has no metric, or it takes too long. It is noted, with the
    reason, counts as the worst metric so far, and the search goes on. With --out DIR the trials are in Optuna's storage, and
    the same command line goes on after any interruption.
    """
    from sparsekit.bandit.study import Study
    from sparsekit.cli.trials import finish_study, run_study

    for name, number in (("--jobs", jobs), ("--trials", trials)):
        if number is not None and number < 1:
            raise InvalidValueError(f"{name} must be an integer >= 1, got {number}")
    if timeout is not None and not timeout > 0:
        raise InvalidValueError(f"--timeout must be a number of seconds above 0, got {timeout}")
    if resume and out is None:
        raise InvalidValueError("--resume needs --out DIR, the folder of the search to go on with")
    kept, before = (out and Study.settings_in(out)) or ({}, _TRIALS)
    if resume and not kept:
        raise InvalidValueError(f"{out} holds no search to go on with; leave out --resume to begin one there")
    given = {"command": command, "space": space or None, "metric": metric, "maximize": maximize, "sampler": sampler,
             "seed": seed, "deterministic": deterministic}  # fmt: skip
    settings = _DEFAULTS | kept | {name: value for name, value in given.items() if value is not None}
    for name, shown in _NEEDED.items():
        if name not in settings:
            raise InvalidValueError(f"{shown} is missing; see sparsekit tune --help for examples")
    if settings["seed"] < 0:
        raise InvalidValueError(f"--seed must be an integer >= 0, got {settings['seed']}")
    axes, wanted = parse_axes(settings["space"]), trials or before
    line, reader = CommandLine(settings["command"], [axis.name for axis in axes]), Metric(settings["metric"])
    go_on = "nothing was kept, since there was no --out DIR"
    if out is not None:
        words = ["sparsekit", "tune", "--resume", "--out", str(out), "--trials", str(wanted)]
        words += [*(["--jobs", str(jobs)] if jobs > 1 else []), *(["--timeout", f"{timeout:g}"] if timeout else [])]
        go_on = f"go on with: {shlex.join(words)}"
    with (
        tempfile.TemporaryDirectory() if out is None else nullcontext(out) as folder,
        Study(
            "tune", axes, settings, maximize=settings["maximize"], sampler=settings["sampler"], seed=settings["seed"],
            trials=wanted, jobs=jobs, deterministic=settings["deterministic"], out=out,
        ) as study,
    ):  # fmt: skip
        with Commands(line, reader, Path(folder) / "logs", timeout_seconds=timeout) as commands:
            run_study(study, commands, wanted, quiet=quiet or as_json, go_on=go_on)
        finish_study(
            study, metric="metric", out=out, as_json=as_json,
            how=lambda trial: line.fill(study.texts(trial), trial=trial.number),
        )  # fmt: skip
