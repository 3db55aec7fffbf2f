"""Shell commands as trials: a line with values to fill in, a pattern for its score, and Commands, which runs them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sparsekit.bandit.trials import Ended, Score
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
