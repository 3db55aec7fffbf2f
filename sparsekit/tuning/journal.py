"""Journal: a search on disk that outlives any death of its process: settings, a line per finished trial, the bandit."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import BaseFileLock, FileLock, Timeout

from sparsekit.errors import DataError, InvalidValueError

__all__ = ["Journal", "Record"]

_SETTINGS, _TRIALS, _STATE = "tune.json", "trials.jsonl", "state.json"


@dataclass(frozen=True, kw_only=True)
class Record:
    """A finished trial.

    Args:
        trial: Counted from 1 as they were begun.
        pull: The id of its pull.
        values: Knob's name → value.
        command: The line that was run.
        status: "ok", or "failed" when it gave no metric.
        metric: What it printed, as a number; None if it failed.
        reason: Why it failed.
        code: The exit code of the command; None if it ran out of time.
        seconds: How long it ran.
    """

    trial: int
    pull: int
    values: Mapping[str, float]
    command: str
    status: Literal["ok", "failed"]
    metric: float | None
    reason: str | None
    code: int | None
    seconds: float


class Journal:
    """The files of one search. A trial counts once its line stands in trials.jsonl; state.json may lag behind it."""

    def __init__(self, folder: Path) -> None:
        """Look at a folder; nothing is written yet.

        Args:
            folder: Holds tune.json, trials.jsonl, state.json, and logs/.

        Raises:
            InvalidValueError: another process writes there now.
            DataError: a file of it is damaged.
        """
        self.folder = folder
        self.settings: dict[str, Any] | None = self._read(_SETTINGS)
        self.state: dict[str, Any] | None = None
        self.records: list[Record] = []
        self._lock: BaseFileLock | None = None

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.folder / name
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise DataError(f"{path} is damaged: {error}; remove the folder and begin anew") from error
        if not isinstance(found, dict):
            raise DataError(f"{path} is damaged: it must hold an object; remove the folder and begin anew")
        return found

    def open(self, settings: Mapping[str, Any]) -> None:
        """Begin to write, or go on.

        Args:
            settings: JSON values; kept as tune.json.

        Raises:
            InvalidValueError: another process writes there now.
            DataError: a file of it is damaged.
        """
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        # The system releases the lock when the process dies, however that happens.
        lock = FileLock(self.folder / ".lock", timeout=0, thread_local=False)
        try:
            lock.acquire()
        except Timeout as error:
            raise InvalidValueError(
                f"another process is tuning in {self.folder}; wait for it, or take another --out"
            ) from error
        self._lock = lock
        self.settings = dict(settings)
        self._write(_SETTINGS, self.settings)
        self.state = self._read(_STATE)
        self.records = self._read_records()

    def close(self) -> None:
        """Let other processes write."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _read_records(self) -> list[Record]:
        path = self.folder / _TRIALS
        if not path.exists():
            return []
        payload = path.read_bytes()
        whole = payload.rfind(b"\n") + 1
        if whole < len(payload):
            # A line that was being written when the process died: its trial is run again.
            with path.open("r+b") as file:
                file.truncate(whole)
        try:
            return [Record(**json.loads(line)) for line in payload[:whole].splitlines()]
        except (TypeError, ValueError) as error:
            raise DataError(f"{path} is damaged: {error}; remove the line, or the folder to begin anew") from error

    def append(self, record: Record) -> None:
        """Append a finished trial, and wait until it is on the disk."""
        self.records.append(record)
        line = json.dumps(asdict(record), ensure_ascii=False, allow_nan=False) + "\n"
        with (self.folder / _TRIALS).open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def save(self, state: Mapping[str, Any]) -> None:
        """Save the state of the bandit, and the number of records in it."""
        self.state = dict(state)
        self._write(_STATE, self.state)

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        temporary = self.folder / f".{name}.{os.getpid()}.tmp"
        try:
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(value, file, allow_nan=False, ensure_ascii=False, indent=1 if name == _SETTINGS else None)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.folder / name)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def logs(self, trial: int) -> tuple[Path, Path]:
        """Where the standard output and the standard error of a trial go."""
        stem = self.folder / "logs" / f"{trial:04d}"
        return stem.with_suffix(".out"), stem.with_suffix(".err")
