"""Commands: how they end, and that nothing of them stays behind."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from sparsekit.tuning.process import Finished, Stopped, run_command, tail


def run(line: str, folder: Path, *, timeout: float | None = None, stop: threading.Event | None = None) -> Finished:
    return run_command(line, out=folder / "out", err=folder / "err", timeout_seconds=timeout, stop=stop or threading.Event())


def test_output_and_exit_code_are_kept(tmp_path: Path) -> None:
    assert run("echo hello | tr a-z A-Z; echo oh >&2; exit 3", tmp_path).code == 3
    assert (tail(tmp_path / "out"), tail(tmp_path / "err")) == ("HELLO\n", "oh\n")


def test_a_command_reads_nothing_from_the_terminal(tmp_path: Path) -> None:
    assert run("cat", tmp_path).code == 0


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie whose parent has not looked yet is dead.
    return not Path(f"/proc/{pid}/stat").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def test_a_command_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    finished = run("sleep 30 & echo $!; wait", tmp_path, timeout=1.5)
    assert finished.code is None
    assert 1.5 <= finished.seconds < 20
    child, deadline = int(tail(tmp_path / "out")), time.monotonic() + 20
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(child)


def test_a_command_that_does_not_listen_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsekit.tuning.process._GRACE_SECONDS", 0.2)
    start = time.monotonic()
    assert run("trap '' TERM; sleep 30 & wait; sleep 30", tmp_path, timeout=0.3).code is None
    assert time.monotonic() - start < 10


def test_stopping_ends_the_command(tmp_path: Path) -> None:
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(Stopped):
        run("sleep 30", tmp_path, stop=stop)
    with pytest.raises(Stopped):
        run("touch never", tmp_path, stop=stop)


def test_only_the_end_of_a_long_output_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsekit.tuning.process._LAST_BYTES", 10)
    (tmp_path / "out").write_bytes(b"x" * 100 + b"\xff accuracy")
    assert tail(tmp_path / "out") == "\ufffd accuracy"
