"""`sparsekit tune`: tune numbers in any command line."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from sparsekit.bandit.make import DEFAULT, registry
from sparsekit.cli.commands import Commands, check_command, filled, metric_pattern
from sparsekit.cli.output import command_app
from sparsekit.errors import InvalidValueError


def _tune(
    command: Annotated[
        str,
        typer.Argument(help="Shell command, in quotes, with {NAME} where a value goes, and {trial} for the trial's number."),
    ],
    space: Annotated[
        list[str],
        typer.Option(help="NAME=LOW:HIGH (behind it :log, :int or both) or NAME=A,B,C. Once per name."),
    ],
    metric: Annotated[
        str,
        typer.Option(help="Regular expression with one group around the number; the last match in the output counts."),
    ],
    maximize: Annotated[bool, typer.Option("--maximize/--minimize", help="Whether more is better.")] = True,
    trials: Annotated[int, typer.Option(min=1, help="Number of trials, those of earlier calls included.")] = 30,
    sampler: Annotated[
        str,
        typer.Option(
            help=f"What chooses values: a bandit ({', '.join(registry)}, or package.module:object), tpe, random or grid."
        ),
    ] = DEFAULT,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the sampler.")] = 0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same command line gives the same metric, so run none twice.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Trials at a time.")] = 1,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which a trial is stopped and counts as failed.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the trials, their output and a picture.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")] = False,
) -> None:
    """Tune numbers and choices in any command line: a bandit chooses them, and a regular expression reads the score.

    A trial has failed when its exit code is not 0, its output has no metric, or it takes too long. It is noted, with the
    reason, counts as the worst metric so far, and the search goes on. With --out DIR the trials are in Optuna's storage, and
    the same command line goes on after any interruption.
    """
    from sparsekit.bandit.axes import parse_axes
    from sparsekit.bandit.study import Study
    from sparsekit.cli.trials import run_search

    if timeout is not None and not timeout > 0:
        raise InvalidValueError(f"--timeout must be a number of seconds above 0, got {timeout}")
    axes = parse_axes(space)
    check_command(command, list(axes))
    pattern = metric_pattern(metric)
    settings = {"command": command, "space": space, "metric": metric, "maximize": maximize, "sampler": sampler, "seed": seed,
                "deterministic": deterministic}  # fmt: skip
    with (
        tempfile.TemporaryDirectory() if out is None else nullcontext(out) as folder,
        Study(
            "tune", axes, settings, maximize=maximize, sampler=sampler, seed=seed, trials=trials, jobs=jobs,
            deterministic=deterministic, out=out,
        ) as study,
        Commands(command, pattern, Path(folder) / "logs", timeout_seconds=timeout) as commands,
    ):  # fmt: skip
        run_search(
            study, commands, trials, metric="metric", out=out, quiet=quiet, as_json=as_json,
            how=lambda _, trial: filled(command, study.texts(trial), trial=trial.number),
        )  # fmt: skip


tune = command_app(
    _tune,
    examples=(
        "sparsekit tune \"python train.py --lr {lr}\" --space lr=1e-4:1e-1:log --metric 'accuracy: (\\S+)'",
        'sparsekit tune "./bench --pool {pool} --mode {mode}" --space pool=1:64:log:int --space mode=fast,safe'
        " --metric 'ms: (\\S+)' --minimize --trials 60 --out runs/bench",
    ),
)
