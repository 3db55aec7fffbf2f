"""Fill placeholders in command lines, run several commands at a time, and read scores from their output."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sparsekit.errors import InvalidValueError

# {{name}} stands for the literal text {name}; ${name} is left to the shell.
_MARK = re.compile(r"\{\{(\w+)\}\}|(?<!\$)\{([A-Za-z_]\w*)\}")
# The largest reward that a bandit takes.
_LARGEST = 1e100
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.05
_LAST_BYTES = 16 * 2**20


def check_command(text: str, names: Sequence[str]) -> None:
    """Check that a command has a placeholder `{name}` for each value, and no others except `{trial}`, the trial number."""
    if not text.strip():
        raise InvalidValueError('the command is empty; write it in quotes, as in "python train.py --lr {lr}"')
    marks = {match[2] for match in _MARK.finditer(text) if match[2]}
    if "trial" in names:
        raise InvalidValueError("--space cannot name trial, since {trial} is the number of the trial; choose another name")
    absent = [name for name in names if name not in marks]
    if absent:
        raise InvalidValueError(f"--space {absent[0]}=… is not in the command; write {{{absent[0]}}} where its value goes")
    foreign = sorted(marks - {*names, "trial"})
    if foreign:
        raise InvalidValueError(
            f"the command has {{{foreign[0]}}}, but no --space defines it; add --space {foreign[0]}=LOW:HIGH,"
            f" or write {{{{{foreign[0]}}}}} for the text {{{foreign[0]}}} itself"
        )


def filled(text: str, values: Mapping[str, str], *, trial: int) -> str:
    texts = {**values, "trial": str(trial)}
    return _MARK.sub(lambda match: f"{{{match[1]}}}" if match[1] else texts[match[2]], text)


def metric_pattern(text: str) -> re.Pattern[str]:
    """Compile a regular expression with one group, around the score; `^` and `$` match at line ends."""
    try:
        pattern = re.compile(text, re.MULTILINE)
    except re.error as error:
        raise InvalidValueError(f"--metric is not a regular expression: {error}, got {text!r}") from error
    if pattern.groups != 1:
        raise InvalidValueError(
            f"--metric must have one group, around the number, got {pattern.groups} in {text!r};"
            r" write accuracy: ([\d.]+) for example, and (?:…) for other parentheses"
        )
    return pattern


def read_metric(pattern: re.Pattern[str], *outputs: str) -> float:
    """Return the number of the last match in the first of `outputs` that matches; its magnitude is at most 1e100."""
    for output in outputs:
        # Color codes may separate a word from its number. A progress bar overwrites its line by carriage returns.
        matches = pattern.findall(_COLOURS.sub("", output).replace("\r", "\n"))
        if not matches:
            continue
        try:
            number = float(matches[-1])
        except ValueError:
            raise InvalidValueError(f"--metric captured {matches[-1]!r}, which is not a number") from None
        if not abs(number) <= _LARGEST:
            raise InvalidValueError(f"the metric is {number:g}")
        return number
    raise InvalidValueError(f"the output does not match --metric {pattern.pattern!r}")


class Commands(contextlib.AbstractContextManager["Commands"]):
    """Runs command lines, each in a separate process group. When the context exits, running commands are stopped.

    Args:
        metric: Finds the score in the output.
        logs: Folder for standard output and standard error, `NUMBER.out` and `NUMBER.err`.
        timeout_seconds: Time after which a command and its children are stopped and count as failed; None: no limit.
    """

    def __init__(self, metric: re.Pattern[str], logs: Path, *, timeout_seconds: float | None = None) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._metric, self._logs, self._timeout = metric, logs, timeout_seconds
        self.running: dict[int, tuple[subprocess.Popen[bytes], float]] = {}

    def __exit__(self, *_: object) -> None:
        for number in list(self.running):
            self._stop(number)

    def _log(self, number: int, kind: str) -> Path:
        return self._logs / f"{number:04d}.{kind}"

    def start(self, number: int, line: str) -> None:
        with self._log(number, "out").open("wb") as output, self._log(number, "err").open("wb") as errors:
            # In a separate process group, Ctrl-C does not reach the command, and its children can be stopped with it.
            process = subprocess.Popen(
                line, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
            )
        self.running[number] = process, time.monotonic()

    def poll(self) -> Iterator[tuple[int, float | None, str]]:
        """Wait 50 ms, then yield (number, score, reason of failure) of ended commands: score None, or an empty reason."""
        time.sleep(_POLL_SECONDS)
        for number, (process, began) in list(self.running.items()):
            code = process.poll()
            late = code is None and self._timeout is not None and time.monotonic() - began > self._timeout
            if code is None and not late:
                continue
            self._stop(number)
            yield (number, None, f"ran longer than {self._timeout:g} s") if late else (number, *self._read(number, code or 0))

    def _read(self, number: int, code: int) -> tuple[float | None, str]:
        errors = _tail(self._log(number, "err"))
        if code:
            last = ([text.strip() for text in errors.splitlines() if text.strip()] or [""])[-1]
            ended = f"signal {-code}" if code < 0 else f"exit code {code}"
            return None, f"{ended}: {last[:200]}".removesuffix(": ")
        try:
            return read_metric(self._metric, _tail(self._log(number, "out")), errors), ""
        except InvalidValueError as error:
            return None, str(error)

    def _stop(self, number: int) -> None:
        process, _ = self.running.pop(number)
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
        # Also after the shell has ended: its children may still run.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _LAST_BYTES))
        return file.read().decode(errors="replace")
