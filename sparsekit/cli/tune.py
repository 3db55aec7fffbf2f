"""`sparsekit tune`: search for the best values of any command line, with Optuna's study and journal."""

from __future__ import annotations

import contextlib
import json
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsekit.bandit.make import DEFAULT, registry
from sparsekit.bandit.search_space import parse_axes
from sparsekit.cli import INTERRUPTED, AsJson, command_app, print_table
from sparsekit.cli.commands import Commands, check_command, metric_pattern
from sparsekit.errors import InvalidValueError, require

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from sparsekit.cli.search import Search

_FAILED = 2
_MAX_ROWS = 15


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C and SIGTERM set, so that no journal entry is half written. A second signal interrupts."""
    stopped = threading.Event()

    def stop(*_: Any) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM) if main}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tune(
    command: Annotated[
        str,
        typer.Argument(help="Shell command, in quotes, with {NAME} where a value goes, and {trial} for the trial's number."),
    ],
    space: Annotated[
        list[str], typer.Option(help="NAME=LOW:HIGH, optionally followed by :log, :int or both; or NAME=A,B,C. Once per name.")
    ],
    metric: Annotated[
        str, typer.Option(help="Regular expression with one group around the number; the last match in the output counts.")
    ],
    minimize: Annotated[bool, typer.Option("--minimize", help="Smaller scores are better. Default: larger ones.")] = False,
    trials: Annotated[int, typer.Option(metavar="N", min=1, help="Number of trials, those of earlier calls included.")] = 30,
    sampler: Annotated[
        str,
        typer.Option(help=f"Chooses the values: a bandit ({', '.join(registry)}, or package.module:object), tpe or random."),
    ] = DEFAULT,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Random seed of the sampler.")] = 0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The command is deterministic: never run it again with the same values.")
    ] = False,
    jobs: Annotated[int, typer.Option(metavar="N", min=1, help="Trials at a time.")] = 1,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which a trial is stopped and counts as failed.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the trials and their output.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print trials to stderr as they end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tune numbers and choices in any command line: a bandit chooses them, and a regular expression reads the score.

    A trial fails if its exit code is not 0, its output has no metric, or it takes too long. It is recorded with the reason,
    counts as the worst metric so far, and the search continues. With --out DIR, the trials are kept in a journal of Optuna,
    and the same command line resumes the search after any interruption.
    """
    if timeout is not None and not timeout > 0:
        raise InvalidValueError(f"--timeout must be a number of seconds above 0, got {timeout}")
    require("optuna")
    axes = parse_axes(space)
    check_command(command, list(axes))
    pattern = metric_pattern(metric)
    settings = {"command": command, "space": space, "metric": metric, "maximize": not minimize, "sampler": sampler,
                "seed": seed, "deterministic": deterministic}  # fmt: skip
    from sparsekit.cli.search import opened

    with (
        opened(command, axes, settings, trials=trials, jobs=jobs, out=out) as search,
        tempfile.TemporaryDirectory() if out is None else contextlib.nullcontext(out) as folder,
        Commands(pattern, Path(folder) / "logs", timeout_seconds=timeout) as commands,
        _signals() as stopped,
    ):
        silent = quiet or as_json
        if search.ended and not silent:
            typer.echo(f"resuming after {len(search.ended)} trials", err=True)
        for trial in search.run(commands, stopped):
            if not silent:
                typer.echo(_line(search, trial), err=True)
        if search.used_up and len(search.ended) < trials:
            typer.echo(f"all {len(search.ended)} combinations of values have been tried", err=True)
        best = search.best()
        if stopped.is_set():
            so_far = "" if best is None else f"; best so far {best.value:g} with {_values(search.texts(best.params))}"
            resume = "nothing was kept, since --out was not given" if out is None else "the same command line resumes"
            typer.echo(f"stopped after {len(search.ended)} of {trials} trials{so_far}\n{resume}", err=True)
            raise typer.Exit(INTERRUPTED)
        _finish(search.report() | {"out": None if out is None else str(out)}, as_json=as_json)


def _finish(report: Mapping[str, Any], *, as_json: bool) -> None:
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False)
    out, best, recommended = report["out"], report["best"], report["recommended"]
    if out is not None:
        Path(out, "trials.json").write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
    else:
        _print(report)
    if best is None:
        number, last = len(report["trials"]), report["trials"][-1]["error"]
        failed = "the only trial has failed" if number == 1 else f"all {number} trials have failed; the last"
        typer.echo(f"error: {failed}: {last}{'' if out is None else f'; see {out}'}", err=True)
        raise typer.Exit(_FAILED)
    if as_json:
        return
    lucky = recommended is not None and recommended["trial"] != best["trial"]
    if lucky:
        typer.echo("The recommended trial has the best mean there and nearby; the best one may have been lucky.")
    typer.echo(f"best: {best['command']}")
    if lucky:
        typer.echo(f"recommended: {recommended['command']}")
    if out is not None:
        typer.echo(f"Every trial is in {out}")


def _values(texts: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in texts.items())


def _line(search: Search, trial: FrozenTrial) -> str:
    best = search.best()
    new = "  best" if best is not None and best.number == trial.number else ""
    outcome = f"failed ({search.error(trial)})" if trial.value is None else f"{trial.value:g}{new}"
    return f"trial {trial.number}: {_values(search.texts(trial.params))} → {outcome}"


def _print(report: Mapping[str, Any]) -> None:
    rows = report["trials"]
    failed = f", {report['failed']} failed" if report["failed"] else ""
    better = "larger" if report["maximize"] else "smaller"
    typer.echo(f"{len(rows)} trials{failed}; {report['sampler']}, {better} is better")
    chosen = {kind: report[kind]["trial"] for kind in ("recommended", "best") if report[kind]}
    notes = {number: kind for kind, number in chosen.items()}  # "best" replaces "recommended"
    rows = sorted(rows, key=lambda row: (row["score"] is None, (row["score"] or 0.0) * (-1 if report["maximize"] else 1)))
    shown = [
        (
            str(row["trial"]),
            "" if row["score"] is None else f"{row['score']:.6g}",
            *(value if isinstance(value, str) else f"{value:.6g}" for value in row["values"].values()),
            "failed" if row["score"] is None else notes.get(row["trial"], ""),
        )
        for row in rows[:_MAX_ROWS]
    ]
    print_table(("trial", "metric", *rows[0]["values"], ""), shown)
    scores = [row["score"] for row in report["trials"]]
    if len(scores) > 2 and any(score is not None for score in scores):
        typer.echo(f"metric by trial: {curve(scores)}")


def curve(scores: Sequence[float | None], *, width: int = 50) -> str:
    """Draw scores as at most `width` bars, followed by the smallest and the largest score. A failed trial is a dot.

    With more trials than bars, each bar is a mean of neighbors.
    """
    known = [score for score in scores if score is not None]
    low, high = min(known), max(known)
    bars = []
    for place in range(min(width, len(scores))):
        part = scores[place * len(scores) // min(width, len(scores)) : (place + 1) * len(scores) // min(width, len(scores))]
        own = [score for score in part if score is not None]
        height = (sum(own) / len(own) - low) / (high - low) if own and high > low else 0.0
        bars.append("▁▂▃▄▅▆▇█"[min(7, int(8 * height))] if own else "·")
    return f"{''.join(bars)}  {low:.4g} to {high:.4g}"


tune = command_app(
    _tune,
    examples=(
        "sparsekit tune \"python train.py --lr {lr}\" --space lr=1e-4:1e-1:log --metric 'accuracy: (\\S+)'",
        'sparsekit tune "./bench --pool {pool} --mode {mode}" --space pool=1:64:log:int --space mode=fast,safe'
        " --metric 'ms: (\\S+)' --minimize --trials 60 --out runs/bench",
    ),
)
