"""`sparsekit tune`: tune numbers in any command line, whose runs are the trials and whose output has the score."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from sparsekit.bandit.make import DEFAULT, registry
from sparsekit.bandit.trials import Ended, Score
from sparsekit.cli.output import command_app
from sparsekit.errors import InvalidValueError

# {{name}} is the text {name}; ${name} is the shell's own.
_MARK = re.compile(r"\{\{(\w+)\}\}|(?<!\$)\{([A-Za-z_]\w*)\}")
# What a bandit takes as a reward.
_LARGEST = 1e100
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_GRACE_SECONDS = 3.0
_LOOK_SECONDS = 0.05
_LAST_BYTES = 16 * 2**20


def check_command(text: str, names: Sequence[str]) -> None:
    """Check that a command line for the shell says where its values go: `{name}`, and `{trial}` for the trial's number.

    Args:
        text: What the user wrote. All but the marks goes to the shell untouched.
        names: Each must be in the text, and nothing else may.
    """
    if not text.strip():
        raise InvalidValueError('the command is empty; write it in quotes, as in "python train.py --lr {lr}"')
    marks = {found[2] for found in _MARK.finditer(text) if found[2]}
    if "trial" in names:
        raise InvalidValueError("--space cannot name trial, since {trial} is the number of the trial; take another name")
    absent = [name for name in names if name not in marks]
    if absent:
        raise InvalidValueError(f"--space {absent[0]}=… is not in the command; write {{{absent[0]}}} where its value goes")
    foreign = sorted(marks - {*names, "trial"})
    if foreign:
        raise InvalidValueError(
            f"the command has {{{foreign[0]}}}, which no --space says; add --space {foreign[0]}=LOW:HIGH,"
            f" or write {{{{{foreign[0]}}}}} for the text {{{foreign[0]}}} itself"
        )


def filled(text: str, values: Mapping[str, str], *, trial: int) -> str:
    """The command line of one trial."""
    texts = {**values, "trial": str(trial)}
    return _MARK.sub(lambda found: f"{{{found[1]}}}" if found[1] else texts[found[2]], text)


def metric_pattern(text: str) -> re.Pattern[str]:
    """Read a regular expression with one group, around the score; `^` and `$` match at lines."""
    try:
        pattern = re.compile(text, re.MULTILINE)
    except re.error as error:
        raise InvalidValueError(f"--metric is no regular expression: {error}, got {text!r}") from error
    if pattern.groups != 1:
        raise InvalidValueError(
            f"--metric must have one group, around the number, got {pattern.groups} in {text!r};"
            r" write accuracy: ([\d.]+) for example, and (?:…) for other parentheses"
        )
    return pattern


def read_metric(pattern: re.Pattern[str], *outputs: str) -> float:
    """The number of the last match in the first of `outputs` that has one; at most 1e100 in magnitude."""
    for output in outputs:
        # Colours would stand between a word and its number, and a progress bar writes many lines over each other.
        matches = pattern.findall(_COLOURS.sub("", output).replace("\r", "\n"))
        if not matches:
            continue
        try:
            number = float(matches[-1])
        except ValueError:
            raise InvalidValueError(f"the metric is no number: {matches[-1]!r}") from None
        if not abs(number) <= _LARGEST:
            raise InvalidValueError(f"the metric is {number:g}")
        return number
    raise InvalidValueError(f"the output has no match of the metric, {pattern.pattern!r}")


class Commands(contextlib.AbstractContextManager["Commands"]):
    """Runs command lines, each in a process group of its own; on leaving, what still runs is ended.

    Args:
        text: The command line, with its marks.
        metric: Where the score stands.
        logs: Folder for standard output and standard error, `NUMBER.out` and `NUMBER.err`.
        timeout_seconds: After this long, a command and all that it started are ended, and it has failed; None: never.
    """

    def __init__(self, text: str, metric: re.Pattern[str], logs: Path, *, timeout_seconds: float | None = None) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._text, self._metric, self._logs, self._timeout = text, metric, logs, timeout_seconds
        # Of trials: the process, and when it began.
        self._running: dict[int, tuple[subprocess.Popen[bytes], float]] = {}

    def __exit__(self, *_: object) -> None:
        for number in list(self._running):
            self.stop(number)

    def _log(self, number: int, kind: str) -> Path:
        return self._logs / f"{number:04d}.{kind}"

    def start(self, number: int, values: Mapping[str, str]) -> None:
        """Begin a trial."""
        line = filled(self._text, values, trial=number)
        with self._log(number, "out").open("wb") as output, self._log(number, "err").open("wb") as errors:
            # A group of its own, so that Ctrl-C comes here alone, and the end of the trial reaches all that it started.
            process = subprocess.Popen(
                line, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
            )
        self._running[number] = process, time.monotonic()

    def poll(self) -> Iterator[tuple[int, Score | Ended]]:
        """Wait a moment, and yield the trials that have ended."""
        time.sleep(_LOOK_SECONDS)
        for number, (process, began) in list(self._running.items()):
            seconds, code = time.monotonic() - began, process.poll()
            late = code is None and self._timeout is not None and seconds > self._timeout
            if code is None and not late:
                continue
            self.stop(number)
            value, reason = (None, f"ran longer than {self._timeout:g} s") if late else self._read(number, code or 0)
            yield number, Ended(value, reason, {"command": process.args, "code": code, "seconds": round(seconds, 3)})

    def _read(self, number: int, code: int) -> tuple[float | None, str]:
        """The metric of a command that has ended, or why it has none."""
        errors = tail(self._log(number, "err"))
        if code:
            last = ([text.strip() for text in errors.splitlines() if text.strip()] or [""])[-1]
            ended = f"signal {-code}" if code < 0 else f"exit code {code}"
            return None, f"{ended}: {last[:200]}".removesuffix(": ")
        try:
            return read_metric(self._metric, tail(self._log(number, "out")), errors), ""
        except InvalidValueError as error:
            return None, str(error)

    def stop(self, number: int) -> None:
        """End a trial, with all that it started: ask the group to end, and kill what does not."""
        process, _ = self._running.pop(number)
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
        # Also after the shell has ended: what it started may still run.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tail(path: Path) -> str:
    """The last 16 MiB of a text file, whatever its bytes."""
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _LAST_BYTES))
        return file.read().decode(errors="replace")


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
    from sparsekit.bandit.study import Study
    from sparsekit.bandit.trials import parse_axes
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
