"""What a run keeps on disk: memories of clients, records, and a checkpoint from which it resumes to the same bits.

The order of writing makes every moment safe for a crash: memories, the line of `rounds.jsonl`, the checkpoint. Only then are
older memories deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from sparsekit.errors import DataError, nearest
from sparsekit.graph import digest
from sparsekit.version import __version__
from sparsekit_fl.client.context import Memory
from sparsekit_fl.errors import ResumeError
from sparsekit_fl.fingerprint import data_fingerprint
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.results.records import RoundRecord, plain
from sparsekit_fl.spec import RunSpec, short_digest
from sparsekit_fl.storage import dumps, loads, lock_folder, sync_folder, write_atomically

_CHECKPOINT, _BEGUN, _RECORDS = "checkpoint.pt", "run.json", "rounds.jsonl"
_MEMORY_FILE = re.compile(r"\d+-\d+\.pt")
# How often is scored changes no bit of what is learned, so a resumed run may do it otherwise.
_SCORING = ("eval_every", "eval_clients", "eval_global_every")


class Memories:
    """Memories of clients as files: one version per client and round. Whoever trains a client writes its memory.

    A version that no checkpoint names yet is harmless: training that client again writes the same bytes.

    Args:
        folder: Where the files are; made if absent.
        durable: Wait until files are on the disk, so that a power cut cannot lose them.
    """

    def __init__(self, folder: Path, *, durable: bool) -> None:
        self.folder, self.durable = folder, durable
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, client_id: int, round: int) -> Path:
        """Return where a memory is."""
        return self.folder / f"{client_id}-{round}.pt"

    def read(self, client_id: int, round: int | None) -> Memory:
        """Return the memory of a client as written in `round`; empty for None.

        Raises:
            DataError: it is missing or damaged.
        """
        if round is None:
            return {}
        path = self.path(client_id, round)
        try:
            saved = loads(path.read_bytes())
            if saved["client"] != [client_id, round]:
                raise DataError(f"it belongs to client {saved['client'][0]} in round {saved['client'][1]}")
            memory: Memory = saved["memory"]
        except (OSError, DataError) as error:
            raise DataError(f"the memory of client {client_id} of round {round} cannot be read from {path}: {error}") from error
        return memory

    def write(self, client_id: int, round: int, memory: Memory) -> None:
        """Write a memory; `sync` makes its name durable.

        Raises:
            MemoryStateError: it holds something that cannot be saved.
        """
        payload = dumps({"client": [client_id, round], "memory": memory})
        write_atomically(self.path(client_id, round), payload, durable=self.durable, sync=False)

    def sync(self) -> None:
        """Wait until the names of the files are on the disk; before a checkpoint names them."""
        if self.durable:
            sync_folder(self.folder)

    def remove(self, versions: Mapping[int, int]) -> None:
        """Remove these versions."""
        for client_id, round in versions.items():
            self.path(client_id, round).unlink(missing_ok=True)

    def keep(self, versions: Mapping[int, int]) -> None:
        """Remove every version but these, such as those of a round that a crash cut off; other files stay."""
        kept = {self.path(client_id, round).name for client_id, round in versions.items()}
        for path in self.folder.iterdir():
            name = path.name.removeprefix(".").partition(".pt.")[0] + ".pt" if path.name.endswith(".tmp") else path.name
            if _MEMORY_FILE.fullmatch(name) and path.name not in kept:
                path.unlink()


@dataclass
class State:
    """Everything that changes from round to round, after the last finished one.

    Args:
        round: The last finished round; 0 before the first.
        model: The whole dense global state; entries that are not shared stay as they were at first.
        memory: State of the method on the server.
        versions: Client id → round in which its valid memory was written; clients without memory are absent.
        callbacks: Class and state of each callback.
        extended: How many rounds the run had, each time that a finished run was given more.
    """

    round: int
    model: dict[str, Tensor]
    memory: Memory = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    callbacks: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    extended: tuple[int, ...] = ()


def describe_run(spec: RunSpec, clients: Mapping[int, Client], experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that must be equal for a run to be resumed, as plain JSON values."""
    devices = [[client.id, *astuple(client.capability)] for client in clients.values()]
    described = {
        "method": spec.method.describe(),
        "config": spec.config.to_dict(),
        "experiment": dict(experiment),
        "clients": {
            "count": len(clients),
            "capabilities": short_digest(devices),
            "data": data_fingerprint(clients.values()),
        },
        "model": {**spec.fingerprint(), "initial": digest(spec.initial)[:16]},
    }
    return json.loads(json.dumps(plain(described)))  # type: ignore[no-any-return]


def differences(saved: Any, given: Any, path: str = "") -> list[str]:
    """Return one text for each place where two plain JSON values differ, as in `lr: was 0.1, now 0.01`."""
    if isinstance(saved, dict) and isinstance(given, dict):
        found = []
        for key in sorted(set(saved) | set(given)):
            found += differences(saved.get(key), given.get(key), f"{path}.{key}" if path else key)
        return found
    return [] if saved == given else [f"{path}: was {json.dumps(saved)}, now {json.dumps(given)}"]


def holds_run(path: Path) -> bool:
    """Whether a folder holds a run that can be resumed, perhaps from its first round on."""
    return any((path / name).exists() for name in (_CHECKPOINT, _BEGUN))


class RunFolder:
    """The files of a run: `run.json`, `checkpoint.pt`, `rounds.jsonl`, `clients/`, `models/`, `result.json`.

    No two runs write to one folder: a lock is held from here to `close`. The folder is made if absent, unless the run is to be
    resumed. A fresh run deletes nothing that was there before.

    Raises:
        FolderInUseError: another run writes to it.
        ResumeError: there is nothing to resume; or it holds files of a run, and `resume` is False.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        self._run: dict[str, Any] = {}
        self._records = path / _RECORDS
        self._written = hashlib.sha256()  # of what is in that file
        self._checkpoint = path / _CHECKPOINT
        if resume and not holds_run(path):
            raise ResumeError(_nothing_there(path))
        self._lock = lock_folder(path)
        if not resume:
            found = _files_of_a_run(path)
            if found:
                self._lock.release()
                raise ResumeError(
                    f"{path} already holds a run ({', '.join(found)}); resume it with resume=True (--resume), or choose another"
                    " folder"
                )
        if not self._checkpoint.exists():
            # From now on there is something to resume, whatever happens before the first round is saved.
            write_atomically(path / _BEGUN, b"{}")

    def close(self) -> None:
        """Let other runs write to the folder."""
        self._lock.release()

    def load(self, described: Mapping[str, Any]) -> tuple[State | None, list[RoundRecord]]:
        """Return state and records of the last saved round; no state for a run that begins.

        Args:
            described: From `describe_run`; it must be equal to what was saved.

        Raises:
            ResumeError: an option, the model or the data changed, or a file is damaged.
        """
        self._run = {"sparsekit": __version__, **described}
        for left_over in (*self.path.glob(".*.tmp"), *(self.path / "models").glob(".*.tmp")):
            left_over.unlink()
        if not self._checkpoint.exists():
            self._records.unlink(missing_ok=True)  # of a first round that was cut off
            write_atomically(self.path / _BEGUN, (json.dumps(self._run, indent=1) + "\n").encode())
            return None, []
        try:
            saved = loads(self._checkpoint.read_bytes())
            state = State(**saved["state"])
            state.extended = (*state.extended, *self._refuse_changes(saved["run"], described, state.round))
            return state, self._read_records(saved["records_bytes"], saved["records_sha256"], state.round)
        except (DataError, KeyError, TypeError) as error:
            raise ResumeError(
                f"the checkpoint {self._checkpoint} is damaged: {error}; restore a copy of the folder, or start in another"
            ) from error

    def _refuse_changes(self, saved: Mapping[str, Any], described: Mapping[str, Any], round: int) -> list[int]:
        """Return how many rounds the run had, if it is given more."""
        before, now = saved["config"]["rounds"], described["config"]["rounds"]
        more = now > before == round  # a finished run may continue
        config = {**saved["config"], "rounds": now} if more else saved["config"]
        was = {name: {**saved, "config": config}[name] for name in described}
        changed = differences(_learned(was), _learned(described))
        if changed:
            raise ResumeError(
                f"cannot resume the run in {self.path}, since options changed ({'; '.join(changed)});"
                " pass the options it was started with, or another folder. This holds for `rounds` too:"
                " a method may plan its course by the number of rounds; only a finished run may be given more"
            )
        return [before] if more else []

    def _read_records(self, size: int, sha256: str, round: int) -> list[RoundRecord]:
        if not self._records.exists() or self._records.stat().st_size < size:
            raise ResumeError(
                f"{self._records} is shorter than the checkpoint of round {round} says; restore it or start afresh"
            )
        with self._records.open("rb+") as file:
            written = file.read(size)
            self._written = hashlib.sha256(written)
            if self._written.hexdigest() != sha256:
                raise ResumeError(
                    f"{self._records} is damaged: its checksum is not that of round {round}; restore a copy of the folder, or"
                    " start afresh in another"
                )
            file.truncate(size)
        return [RoundRecord.from_dict(json.loads(line)) for line in written.decode().splitlines()]

    def append(self, record: RoundRecord) -> None:
        """Add a line to `rounds.jsonl`; it counts once the checkpoint that follows is on the disk."""
        line = (json.dumps(plain(record.to_dict()), allow_nan=False) + "\n").encode()
        self._written.update(line)
        with self._records.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def save(self, state: State) -> None:
        """Write the checkpoint, atomically."""
        saved = {"run": self._run, "records_bytes": self._records.stat().st_size, "records_sha256": self._written.hexdigest()}
        write_atomically(self._checkpoint, dumps({**saved, "state": {**vars(state)}}))


def _learned(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the bits of a run: all but how often it is scored."""
    config = {name: value for name, value in described["config"].items() if name not in _SCORING}
    return {**described, "config": config}


def _files_of_a_run(path: Path) -> list[str]:
    """Return the files that a fresh run would write over; a run that was cut off in its first round leaves none that counts."""
    if (path / _CHECKPOINT).exists():
        return [_CHECKPOINT]
    if (path / _BEGUN).exists():
        return ["result.json"] if (path / "result.json").exists() else []
    folders = [name for name in ("clients", "models") if (path / name).is_dir() and any((path / name).iterdir())]
    return [name for name in (_RECORDS, "result.json") if (path / name).exists()] + [f"{name}/" for name in folders]


def _nothing_there(path: Path) -> str:
    siblings = [other.name for other in path.parent.iterdir() if holds_run(other)] if path.parent.is_dir() else []
    hint = f"; {nearest(path.name, siblings)}" if siblings else ""
    return f"no run to resume in {path}{hint}; check the path, or omit resume=True (--resume) to start a new run there"
