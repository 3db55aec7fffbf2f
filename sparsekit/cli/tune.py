"""`sparsekit tune`: tune numbers in any command line."""

from __future__ import annotations

import json
import shlex
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from sparsekit.bandit.make import DEFAULT, registry
from sparsekit.errors import DataError, InvalidValueError, MissingDependencyError
from sparsekit.tuning.config import TuneConfig
from sparsekit.tuning.journal import Journal, Record
from sparsekit.tuning.progress import LiveSearch
from sparsekit.tuning.search import Search

__all__ = ["tune"]

INTERRUPTED, FAILED = 130, 2
_DEFAULTS: dict[str, Any] = {"maximize": True, "bandit": DEFAULT, "seed": 0, "deterministic": False, "trials": 30}
_VERSION = 1

tune = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@tune.command(
    cls=TyperCommand,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Examples:\n\n"
    "$ sparsekit tune \"python train.py --lr {lr}\" --space lr=1e-4:1e-1:log --metric 'accuracy: (\\S+)'\n\n"
    '$ sparsekit tune "./bench --pool {pool} --wait {wait}" --space pool=1:64:log:int --space wait=0:2'
    " --metric 'ms: (\\S+)' --minimize --trials 60 --out runs/bench\n\n"
    "$ sparsekit tune --resume --out runs/bench --trials 90",
)
def _tune(
    command: Annotated[
        str | None,
        typer.Argument(help="For the shell, in quotes, with {NAME} where a value goes, and {trial} for the trial's number."),
    ] = None,
    space: Annotated[
        list[str] | None,
        typer.Option(help="NAME=LOW:HIGH of a number to tune; behind it :log, :int or both. Once per number."),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="Regular expression with one group around the number; the last match in the output counts."),
    ] = None,
    maximize: Annotated[
        bool | None, typer.Option("--maximize/--minimize", help="Whether more is better. Default: --maximize.")
    ] = None,
    trials: Annotated[int | None, typer.Option(help="How many, those before --resume included. Default: 30.")] = None,
    bandit: Annotated[
        str | None,
        typer.Option(help=f"Who chooses values: {', '.join(registry)}, or package.module:object. Default: {DEFAULT}."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the bandit. Default: 0.")] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option(
            "--deterministic", help="Equal command lines give equal metrics: run none of them twice.", show_default=False
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Trials at a time.")] = 1,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which a trial is ended and has failed.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the trials, their output, the state and a picture.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the search in --out.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")] = False,
) -> None:
    """Tune numbers in any command line: a bandit chooses them, and a regular expression reads the score.

    A trial has failed when its exit code is not 0, its output has no metric, or it takes too long. It is noted, with the
    reason, counts as the worst metric so far, and the search goes on.
    """
    given = {"command": command, "space": tuple(space) if space else None, "metric": metric, "maximize": maximize,
             "bandit": bandit, "seed": seed, "deterministic": deterministic}  # fmt: skip
    if jobs < 1:
        raise InvalidValueError(f"--jobs must be an integer >= 1, got {jobs}")
    if timeout is not None and not timeout > 0:
        raise InvalidValueError(f"--timeout must be a number of seconds above 0, got {timeout}")
    if trials is not None and trials < 1:
        raise InvalidValueError(f"--trials must be an integer >= 1, got {trials}")
    if resume and out is None:
        raise InvalidValueError("--resume needs --out DIR, the folder of the search to go on with")
    with tempfile.TemporaryDirectory() if out is None else nullcontext(out) as folder:
        journal = Journal(Path(folder))
        config, wanted = _config(given, trials, journal, resume=resume)
        journal.open({"version": _VERSION, "trials": wanted, **asdict(config)})
        try:
            search = Search(config, journal)
            _run(search, wanted, jobs, timeout, out=out, quiet=quiet or as_json)
            _report(search, out, as_json=as_json)
        finally:
            journal.close()


def _config(given: dict[str, Any], trials: int | None, journal: Journal, *, resume: bool) -> tuple[TuneConfig, int]:
    """What is to be run: what was said, or what the folder says, which must not contradict each other."""
    said = {name: value for name, value in given.items() if value is not None}
    kept = journal.settings
    if kept is None:
        if resume:
            raise InvalidValueError(f"{journal.folder} holds no search to go on with; leave out --resume to begin one there")
        for name, shown in (
            ("command", "a command in quotes"),
            ("space", "--space NAME=LOW:HIGH"),
            ("metric", "--metric REGEX"),
        ):
            if name not in said:
                raise InvalidValueError(f"{shown} is missing; see sparsekit tune --help for examples")
        wanted = trials or int(_DEFAULTS["trials"])
        chosen = {name: value for name, value in _DEFAULTS.items() if name != "trials"} | said
        return TuneConfig(**chosen, horizon=wanted), wanted
    if not resume:
        raise InvalidValueError(f"{journal.folder} already holds a search; pass --resume to go on with it, or another --out")
    try:
        stored = {name: kept[name] for name in (*given, "horizon")}
        stored["space"] = tuple(stored["space"])
        if kept["version"] != _VERSION:
            raise DataError(f"{journal.folder}/tune.json has version {kept['version']!r}, this is {_VERSION}")
        wanted = trials or int(kept["trials"])
        config = TuneConfig(**stored)
    except (KeyError, TypeError) as error:
        raise DataError(f"{journal.folder}/tune.json is damaged: {error!r}; remove the folder and begin anew") from error
    differing = [f"{name} {value!r} (there {stored[name]!r})" for name, value in said.items() if value != stored[name]]
    if differing:
        raise InvalidValueError(
            f"{journal.folder} holds another search: {'; '.join(differing)}; leave these out, or take another --out"
        )
    return config, wanted


@contextmanager
def _signals() -> Iterator[None]:
    """Ctrl-C also where the shell ignores it for us, and SIGTERM, as KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(search: Search, trials: int, jobs: int, timeout: float | None, *, out: Path | None, quiet: bool) -> None:
    try:
        with _signals(), LiveSearch(quiet=quiet) as progress:
            search.run(trials, jobs=jobs, timeout_seconds=timeout, observer=progress)
    except KeyboardInterrupt:
        best = search.best()
        so_far = "" if best is None else f"; best so far {best.metric:g} with: {best.command}"
        goes_on = "nothing was kept, since there was no --out DIR"
        if out is not None:
            more = [*(["--jobs", str(jobs)] if jobs > 1 else []), *(["--timeout", f"{timeout:g}"] if timeout else [])]
            goes_on = "go on with: " + shlex.join(["sparsekit", "tune", "--resume", "--out", str(out), *more])
        typer.echo(f"stopped after {len(search.records)} of {trials} trials{so_far}\n{goes_on}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _report(search: Search, out: Path | None, *, as_json: bool) -> None:
    report = search.report() | {"out": None if out is None else str(out)}
    best = search.best()
    picture = _picture(search, out)
    if as_json:
        typer.echo(json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False))
    elif best is not None:
        _print(search, best, search.recommended() or best, Console(highlight=False))
    if best is None and search.records:
        last = search.records[-1]
        where = "" if out is None else f"; its output is in {search.journal.logs(last.trial)[0].parent}"
        number = len(search.records)
        failed = "the only trial has failed" if number == 1 else f"all {number} trials have failed; the last"
        typer.echo(f"error: {failed}: {last.reason}{where}", err=True)
        raise typer.Exit(FAILED)
    if out is not None and not as_json:
        typer.echo(
            f"\nEvery trial and its output{'' if picture is None else f', and the picture {picture.name},'} are in {out}"
        )


def _print(search: Search, best: Record, recommended: Record, console: Console) -> None:
    failed = sum(record.metric is None for record in search.records)
    way = "more" if search.config.maximize else "less"
    lost = f", {failed} failed" if failed else ""
    console.print(escape(f"{len(search.records)} trials{lost}; {search.config.bandit}, {way} is better"))
    table = Table()
    table.add_column("")
    table.add_column("metric", justify="right")
    table.add_column("mean", justify="right")
    for knob in search.knobs:
        table.add_column(escape(knob.name), justify="right")
    table.add_column("trial", justify="right")
    rows = [("best seen", best)] if best == recommended else [("best seen", best), ("recommended", recommended)]
    for label, record in rows:
        mean, runs = search.mean(record)
        values = (knob.text(record.values[knob.name]) for knob in search.knobs)
        table.add_row(label, f"{record.metric:g}", f"{mean:g} of {runs}", *values, str(record.trial))
    console.print(table)
    if best != recommended:
        console.print("Recommended is what the bandit would bet on: the mean there and nearby counts, not one lucky trial.")
    for label, record in rows:
        # Not wrapped, so that it can be copied.
        console.print(f"{label}: {record.command}", soft_wrap=True, markup=False)


def _picture(search: Search, out: Path | None) -> Path | None:
    """A picture of the arms, where matplotlib is there and somebody keeps it."""
    if out is None or search.best() is None:
        return None
    from sparsekit.bandit.plot import save_plot

    path, single = out / "arms.png", search.knobs[0].name
    try:
        save_plot(search.bandit, path, minimize=not search.config.maximize, metric="metric", name=single)
    except MissingDependencyError as error:
        # The answer of all trials must not be lost for want of a picture.
        typer.echo(f"warning: no picture: {error}", err=True)
        return None
    return path
