"""Files of a run: memories of clients, records, and a checkpoint from which a run resumes exactly.

Files are written in an order that makes a crash harmless at any time: memories, the line of `rounds.jsonl`, the checkpoint.
Only then are older memories deleted. Memories and the checkpoint are replaced atomically.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor

from sparsekit.errors import DataError, InvalidValueError
from sparsekit.version import __version__
from sparsekit_fl.errors import ResumeError
from sparsekit_fl.packing import pack, unpack

_CHECKPOINT, _RECORDS = "checkpoint.state", "rounds.jsonl"
_FOLDERS_OPEN = os.name != "nt"  # Windows cannot fsync directories
# On Linux, syncfs flushes a whole file system in one call, in the time of one file.
_SYNCFS: Any = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None) if sys.platform == "linux" else None
_ONE_SYNC = _SYNCFS is not None


def sync_folder(folder: Path, *, files: bool = False) -> None:
    """Flush the names of a folder's files to disk. `files` flushes their contents too, which needs syncfs."""
    if not _FOLDERS_OPEN:
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not files:
            os.fsync(handle)
        elif _SYNCFS(handle):
            raise OSError(code := ctypes.get_errno(), os.strerror(code), str(folder))
    finally:
        os.close(handle)


def write_atomically(path: Path, payload: bytes, *, durable: bool = True, sync: bool = True) -> None:
    """Write a file so that a crash leaves the old one or the new one.

    With `durable`, wait until the bytes are on the disk; with `sync` also the name, which `sync_folder` does for many files.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(payload)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if durable and sync:
        sync_folder(path.parent)


def seal(value: Any) -> bytes:
    """Return a packed value after its SHA-256."""
    payload = pack(value)
    return hashlib.sha256(payload).digest() + payload


def unseal(payload: bytes) -> Any:
    """Undo `seal`; raise DataError if the bytes are damaged or have another format."""
    if hashlib.sha256(payload[32:]).digest() != payload[:32]:
        raise DataError("it is damaged: its checksum does not match its content")
    return unpack(payload[32:])


class Memories:
    """Stores memories of clients in files, one per client and round. The process that trains a client writes its memory.

    The server's memories of clients are stored in the same way, in another folder. A file that no checkpoint lists yet is
    harmless: training that client again writes the same bytes. If `durable`, the files are flushed to disk.
    """

    def __init__(self, folder: Path, *, durable: bool) -> None:
        self.folder, self.durable = folder, durable
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, client_id: int, round: int) -> Path:
        return self.folder / f"{client_id}-{round}.state"

    def read(self, client_id: int, round: int | None) -> dict[str, Any]:
        """Return the memory of a client as written in `round`, empty for None; raise DataError if it is missing or damaged."""
        if round is None:
            return {}
        path = self.path(client_id, round)
        try:
            return dict(unseal(path.read_bytes()))
        except (OSError, DataError) as error:
            raise DataError(f"the memory of client {client_id} of round {round} cannot be read from {path}: {error}") from error

    def write(self, client_id: int, round: int, memory: dict[str, Any], *, before: int | None = None) -> int:
        """Write a memory, and return the round of its file: `before` if the file of that round holds the same memory."""
        payload = seal(memory)
        if before is not None and self.path(client_id, before).read_bytes()[:32] == payload[:32]:
            return before
        write_atomically(self.path(client_id, round), payload, durable=self.durable and not _ONE_SYNC, sync=False)
        return round

    def sync(self) -> None:
        """Wait until the files and their names are on the disk. Call this before a checkpoint lists them."""
        if self.durable:
            sync_folder(self.folder, files=_ONE_SYNC)

    def keep(self, versions: Mapping[int, int]) -> None:
        """Delete all memories except `versions` (client id → round), such as those of a round that a crash interrupted."""
        kept = {self.path(client_id, round).name for client_id, round in versions.items()}
        for path in self.folder.glob("[0-9]*-[0-9]*.state"):
            if path.name not in kept:
                path.unlink()


class Remembered(dict[int, dict[str, Any]]):
    """Client id → the server's memory of it, read from its file on first access. `versions`: client id → round of the file."""

    def __init__(self, memories: Memories | None, versions: Mapping[int, int]) -> None:
        super().__init__()
        self._memories, self._versions = memories, versions

    def __missing__(self, client_id: int) -> dict[str, Any]:
        found = {} if self._memories is None else self._memories.read(client_id, self._versions.get(client_id))
        self[client_id] = found
        return found

    def write(self, round: int) -> dict[int, int]:
        """Write the memories that were changed and are not empty. Return the versions of all files."""
        versions = dict(self._versions)
        for client_id, memory in self.items():
            if memory and self._memories is not None:
                versions[client_id] = self._memories.write(client_id, round, memory, before=versions.get(client_id))
        return versions


@dataclass
class State:
    """The state of a run after its last finished round, which is 0 before the first.

    `model` is the whole dense global state, `memory` the state of the method. `versions` and `remembered` map a client to the
    round of its valid memory and of the server's memory of it.
    """

    round: int
    model: dict[str, Tensor]
    memory: dict[str, Any] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    remembered: dict[int, int] = field(default_factory=dict)


def differences(saved: Any, given: Any, path: str = "") -> list[str]:
    """Return one text for each difference between two plain JSON values, as in `lr: was 0.1, now 0.01`."""
    if isinstance(saved, Mapping) and isinstance(given, Mapping):
        named = {key: f"{path}.{key}" if path else key for key in sorted({*saved, *given})}
        return [text for key, name in named.items() for text in differences(saved.get(key), given.get(key), name)]
    return [] if saved == given else [f"{path}: was {json.dumps(saved)}, now {json.dumps(given)}"]


def holds_run(path: Path) -> bool:
    """Return whether a folder holds the checkpoint of a run, from which it can be resumed."""
    return (path / _CHECKPOINT).exists()


class RunFolder:
    """The files of a run. A folder that is not `durable` holds only memories, and is deleted when the run ends."""

    def __init__(self, path: Path, *, durable: bool) -> None:
        self.path, self.durable = path, durable
        self.memories, self.remembered = (Memories(path / name, durable=durable) for name in ("clients", "server"))
        self._checkpoint, self._records = path / _CHECKPOINT, path / _RECORDS
        self._run: dict[str, Any] = {}
        self._size, self._written = 0, hashlib.sha256()  # bytes and hash of rounds.jsonl
        self._state = State(0, {})  # of the last checkpoint

    @staticmethod
    @contextlib.contextmanager
    def open(path: Path | str | None, *, resume: bool) -> Iterator[RunFolder]:
        """Lock the folder of a run for the block; without a path, use a temporary folder.

        A new run in a folder that holds one raises an error. The system releases the lock when the process ends for any reason;
        the file `.lock` stays, and its presence does not mean that the folder is locked. Worker processes do not inherit the
        lock.
        """
        if path is None:
            if resume:
                raise InvalidValueError("resume needs out, the folder of the run to continue")
            with tempfile.TemporaryDirectory(prefix="sparsekit-") as name:
                yield RunFolder(Path(name), durable=False)
            return
        path = Path(path)
        if resume and not holds_run(path):
            raise ResumeError(f"no run to resume in {path}; check the path, or omit resume=True (--resume) to start one there")
        path.mkdir(parents=True, exist_ok=True)
        # Not reentrant: a second run in this process would delete the files of the first one too.
        lock = FileLock(path / ".lock", is_singleton=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ResumeError(
                f"another run is writing to {path}; wait until it has ended, end it, or choose another folder"
            ) from None
        try:
            files = (_CHECKPOINT, _RECORDS, "result.json", "clients/*", "server/*", "models/*")
            if not resume and any(found for name in files for found in path.glob(name)):
                raise ResumeError(
                    f"{path} already holds a run; resume it with resume=True (--resume), or choose another folder"
                )
            yield RunFolder(path, durable=True)
        finally:
            lock.release()

    def load(self, described: Mapping[str, Any], fresh: State) -> tuple[State, list[dict[str, Any]]]:
        """Return the state after the last saved round, and the records of all rounds. A new run saves and returns `fresh`.

        Raises ResumeError if `described` differs from the stored description, or a file is damaged.
        """
        self._run = {"sparsekit": __version__, **described}
        for folder in (self.path, *(self.path / name for name in ("clients", "server", "models"))):
            for left_over in folder.glob(".*.tmp"):
                left_over.unlink()
        state, records = self._read(described) if self._checkpoint.exists() else (fresh, [])
        self._state = replace(state)
        if state is fresh:
            self._save_state(state)
        self.clean()
        return state, records

    def _read(self, described: Mapping[str, Any]) -> tuple[State, list[dict[str, Any]]]:
        try:
            saved = unseal(self._checkpoint.read_bytes())
            state, was, now = State(**saved["state"]), saved["run"], dict(described)
            if was.get("clients", {}).get("ids") != now.get("clients", {}).get("ids"):
                now.pop("clients", None)  # a resumed run may have other clients
            changed = differences({name: was[name] for name in now}, now)
        except (DataError, KeyError, TypeError) as error:
            raise ResumeError(
                f"the checkpoint {self._checkpoint} is damaged: {error}; restore a copy of the folder, or start in another"
            ) from error
        if changed:
            raise ResumeError(
                f"cannot resume the run in {self.path}, since options changed ({'; '.join(changed)}); pass the options it"
                " was started with, or another folder. For a longer run, start another with init=FOLDER (--set init=FOLDER)"
            )
        self._records.touch()
        with self._records.open("rb+") as file:
            written = file.read(saved["records_bytes"])
            self._size, self._written = len(written), hashlib.sha256(written)
            if self._written.hexdigest() != saved["records_sha256"]:
                raise ResumeError(
                    f"{self._records} is damaged: its checksum does not match round {state.round}; restore a copy of the"
                    " folder, or start in another"
                )
            file.truncate(self._size)
        return state, [json.loads(line) for line in written.decode().splitlines()]

    def save(self, state: State, record: Mapping[str, Any]) -> None:
        """Save a round: memories, the line of `rounds.jsonl`, the checkpoint. Then delete the memories that it replaced."""
        if self.durable:
            for one in (self.memories, self.remembered)[: 1 if _ONE_SYNC else 2]:  # one syncfs flushes both folders
                one.sync()
            line = (json.dumps(record, allow_nan=False) + "\n").encode()
            self._size += len(line)
            self._written.update(line)
            with self._records.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        self._save_state(state)
        before, self._state = self._state, replace(state)
        for memories, old, new in (
            (self.memories, before.versions, state.versions),
            (self.remembered, before.remembered, state.remembered),
        ):
            for id, round in old.items():
                if new.get(id) != round:
                    memories.path(id, round).unlink(missing_ok=True)

    def _save_state(self, state: State) -> None:
        if self.durable:
            saved = {"run": self._run, "records_bytes": self._size, "records_sha256": self._written.hexdigest()}
            write_atomically(self._checkpoint, seal({**saved, "state": {**vars(state)}}))

    def clean(self) -> None:
        """Delete memories that the checkpoint does not list, such as those of an interrupted round."""
        self.memories.keep(self._state.versions)
        self.remembered.keep(self._state.remembered)
