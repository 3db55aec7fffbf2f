"""run_command: a shell command in a process group of its own, with a time limit and a way to stop it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Finished", "Stopped", "run_command", "tail"]

_GRACE_SECONDS = 3.0
_LOOK_SECONDS = 0.1
_LAST_BYTES = 16 * 2**20


class Stopped(Exception):
    """The command was ended because the search stops, so its outcome says nothing."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a command ended.

    Args:
        code: Its exit code; negative for the signal that ended it, None if it ran out of time.
        seconds: How long it ran.
    """

    code: int | None
    seconds: float


def run_command(line: str, *, out: Path, err: Path, timeout_seconds: float | None, stop: threading.Event) -> Finished:
    """Run a command line in the shell and wait for it.

    Args:
        line: For `/bin/sh -c`.
        out: Receives its standard output.
        err: Receives its standard error.
        timeout_seconds: After this long, it and all that it started are ended; None waits for ever.
        stop: Once set, likewise.

    Returns:
        How it ended.

    Raises:
        Stopped: `stop` was set before it ended.
    """
    if stop.is_set():
        raise Stopped
    start = time.monotonic()
    with out.open("wb") as output, err.open("wb") as errors:
        # A group of its own, so that Ctrl-C comes here alone, and the end of the trial reaches all that it started.
        process = subprocess.Popen(
            line, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
        )
        try:
            while True:
                try:
                    code = process.wait(_LOOK_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    seconds = time.monotonic() - start
                    if stop.is_set():
                        raise Stopped from None
                    if timeout_seconds is not None and seconds > timeout_seconds:
                        return Finished(code=None, seconds=seconds)
        finally:
            if process.poll() is None:
                _end(process)
    # What was pressed at the terminal may have reached the command before us.
    if stop.is_set() and code != 0:
        raise Stopped
    return Finished(code=code, seconds=time.monotonic() - start)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the group to end, and kill what does not."""
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
