"""Shell commands as trials: CommandLine, with values to fill in; Metric, the score in the output; Commands, which runs them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class CommandLine:
    """A command line for the shell, with `{name}` where a value goes and `{trial}` for the trial's number.

    Args:
        text: What the user wrote. All but the marks goes to the shell untouched.
        names: Each must be in the text, and nothing else may.

    Raises:
        InvalidValueError: a name is not in the text, or the text has a mark that is none.
    """

    text: str
    names: Sequence[str]

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise InvalidValueError('the command is empty; write it in quotes, as in "python train.py --lr {lr}"')
        marks = {found[2] for found in _MARK.finditer(self.text) if found[2]}
        if "trial" in self.names:
            raise InvalidValueError("--space cannot name trial, since {trial} is the number of the trial; take another name")
        absent = [name for name in self.names if name not in marks]
        if absent:
            raise InvalidValueError(f"--space {absent[0]}=… is not in the command; write {{{absent[0]}}} where its value goes")
        foreign = sorted(marks - {*self.names, "trial"})
        if foreign:
            raise InvalidValueError(
                f"the command has {{{foreign[0]}}}, which no --space says; add --space {foreign[0]}=LOW:HIGH,"
                f" or write {{{{{foreign[0]}}}}} for the text {{{foreign[0]}}} itself"
            )

    def fill(self, values: Mapping[str, str], *, trial: int) -> str:
        """The command line of one trial."""
        texts = {**values, "trial": str(trial)}
        return _MARK.sub(lambda found: f"{{{found[1]}}}" if found[1] else texts[found[2]], self.text)


class Metric:
    """Where the score stands in the output of a command."""

    def __init__(self, pattern: str) -> None:
        """Read a regular expression.

        Args:
            pattern: With one group, around the number; `^` and `$` match at lines.

        Raises:
            InvalidValueError: not a regular expression, or not one group.
        """
        try:
            self._expression = re.compile(pattern, re.MULTILINE)
        except re.error as error:
            raise InvalidValueError(f"--metric is no regular expression: {error}, got {pattern!r}") from error
        if self._expression.groups != 1:
            raise InvalidValueError(
                f"--metric must have one group, around the number, got {self._expression.groups} in {pattern!r};"
                r" write accuracy: ([\d.]+) for example, and (?:…) for other parentheses"
            )

    def read(self, *outputs: str) -> float:
        """The number of the last match in the first of `outputs` that has one.

        Raises:
            InvalidValueError: nothing matches, or the match is no number of at most 1e100 in magnitude.
        """
        for output in outputs:
            # Colours would stand between a word and its number, and a progress bar writes many lines over each other.
            lines = _COLOURS.sub("", output).replace("\r", "\n")
            matches = list(self._expression.finditer(lines))
            if not matches:
                continue
            text = matches[-1][1] or ""
            try:
                number = float(text)
            except ValueError:
                raise InvalidValueError(f"the metric is no number: {text!r}") from None
            if not abs(number) <= _LARGEST:
                raise InvalidValueError(f"the metric is {number:g}")
            return number
        raise InvalidValueError(f"the output has no match of the metric, {self._expression.pattern!r}")


@dataclass(frozen=True, kw_only=True)
class _Running:
    process: subprocess.Popen[bytes]
    line: str
    out: Path
    err: Path
    began: float


class Commands(contextlib.AbstractContextManager["Commands"]):
    """Runs command lines, each in a process group of its own; on leaving, what still runs is ended.

    Args:
        line: With its marks.
        metric: Where the score stands.
        logs: Folder for standard output and standard error, `NUMBER.out` and `NUMBER.err`.
        timeout_seconds: After this long, a command and all that it started are ended, and it has failed; None: never.
    """

    def __init__(self, line: CommandLine, metric: Metric, logs: Path, *, timeout_seconds: float | None = None) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._line, self._metric, self._logs, self._timeout = line, metric, logs, timeout_seconds
        self._running: dict[int, _Running] = {}

    def __exit__(self, *_: object) -> None:
        for number in list(self._running):
            self.stop(number)

    def start(self, number: int, values: Mapping[str, str]) -> None:
        """Begin a trial."""
        line, stem = self._line.fill(values, trial=number), self._logs / f"{number:04d}"
        out, err = stem.with_suffix(".out"), stem.with_suffix(".err")
        with out.open("wb") as output, err.open("wb") as errors:
            # A group of its own, so that Ctrl-C comes here alone, and the end of the trial reaches all that it started.
            process = subprocess.Popen(
                line, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
            )
        self._running[number] = _Running(process=process, line=line, out=out, err=err, began=time.monotonic())

    def poll(self) -> Iterator[tuple[int, Score | Ended]]:
        """Wait a moment, and yield the trials that have ended."""
        time.sleep(_LOOK_SECONDS)
        for number, running in list(self._running.items()):
            seconds, code = time.monotonic() - running.began, running.process.poll()
            late = code is None and self._timeout is not None and seconds > self._timeout
            if code is None and not late:
                continue
            self.stop(number)
            value, reason = (None, f"ran longer than {self._timeout:g} s") if late else self._read(running, code or 0)
            facts = {"command": running.line, "code": code, "seconds": round(seconds, 3)}
            yield number, Ended(value, reason, facts)

    def _read(self, running: _Running, code: int) -> tuple[float | None, str]:
        """The metric of a command that has ended, or why it has none."""
        if code:
            last = ([text.strip() for text in tail(running.err).splitlines() if text.strip()] or [""])[-1]
            ended = f"signal {-code}" if code < 0 else f"exit code {code}"
            return None, f"{ended}: {last[:200]}".removesuffix(": ")
        try:
            return self._metric.read(tail(running.out), tail(running.err)), ""
        except InvalidValueError as error:
            return None, str(error)

    def stop(self, number: int) -> None:
        """End a trial, with all that it started: ask the group to end, and kill what does not."""
        process = self._running.pop(number).process
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
