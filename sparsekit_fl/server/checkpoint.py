"""Checkpoint: everything that a run needs to go on after its last finished round, to the same bits.

It stands beside the server and not in `state/`, since records of rounds, which it holds, stand above that folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from sparsekit.errors import DataError, nearest
from sparsekit.graph import digest
from sparsekit_fl.engines.spec import RunSpec, short_digest
from sparsekit_fl.errors import ResumeError
from sparsekit_fl.fingerprint import check_fingerprint
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.results.part import plain
from sparsekit_fl.results.scores import RoundRecord
from sparsekit_fl.results.state.storage import lock_folder, write_atomically
from sparsekit_fl.results.state.store import seal, unseal
from sparsekit_fl.server.server import ServerState

_FORMAT = 1
_CHECKPOINT, _BEGUN = "checkpoint.safetensors", "run.json"
# How often is scored changes no bit of what is learned, so a resumed run may do it otherwise.
_SCORING = ("eval_every", "eval_clients", "eval_global_every")


def describe_run(spec: RunSpec, clients: Mapping[int, Client], experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that must be equal for a run to be resumed, as plain JSON values."""
    devices = [[client.id, *astuple(client.capability)] for client in clients.values()]
    sizes = [[c.id, len(c.data.train), len(c.data.val), len(c.data.test)] for c in clients.values()]
    described = {
        "method": spec.method.describe(),
        "config": spec.config.to_dict(),
        "experiment": dict(experiment),
        "clients": {"count": len(clients), "sizes": short_digest(sizes), "capabilities": short_digest(devices)},
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


@dataclass(frozen=True, eq=False)
class Saved:
    """The content of a checkpoint; of a run that begins, its fingerprint alone.

    `callbacks`: class and state of each. `extended`: how many rounds a finished run had, each time that it was given more.
    """

    fingerprint: Mapping[str, Any]

    server: ServerState | None = None
    memory_rounds: dict[int, int] = field(default_factory=dict)
    records: list[RoundRecord] = field(default_factory=list)
    callbacks: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    extended: tuple[int, ...] = ()


def holds_run(path: Path) -> bool:
    """Whether a folder holds a run that can be resumed, perhaps from its first round on."""
    return any((path / name).exists() for name in (_CHECKPOINT, _BEGUN))


class RunFolder:
    """The files of a run: `run.json`, `checkpoint.safetensors`, `rounds.jsonl`, `clients/`, `models/`, `result.json`.

    No two runs write to one folder: a lock is held from here to `close`. It is made if absent, unless it is to be resumed.

    Raises:
        FolderInUseError: another run writes to it.
        ResumeError: there is nothing to resume; or there is a run, and `resume` is False.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        self._begun: dict[str, Any] = {"format": _FORMAT}  # what a checkpoint says of the run as a whole
        self._rounds = path / "rounds.jsonl"
        self._written = hashlib.sha256()  # of what is in that file
        self._checkpoint = path / _CHECKPOINT
        if resume and not holds_run(path):
            raise ResumeError(_nothing_there(path))
        self._lock = lock_folder(path)
        if self._checkpoint.exists() and not resume:
            self._lock.release()
            raise ResumeError(
                f"{self.path} already holds a run; go on with it by resume=True (--resume), or choose another folder"
            )
        if not self._checkpoint.exists():
            # From now on there is something to resume, whatever happens before the first round is saved.
            write_atomically(path / _BEGUN, json.dumps(self._begun).encode())

    def close(self) -> None:
        """Let other runs write to the folder."""
        self._lock.release()

    def start(self, described: Mapping[str, Any], fingerprint: Mapping[str, Any], *, accept_code: bool = False) -> Saved:
        """Load what was saved, or remove what an interrupted first round left; of a run that starts afresh nothing was saved.

        What `describe_run` and `fingerprint_of` gave must be equal to resume the run, unless code may differ (`accept_code`).

        Raises:
            ResumeError: an option, the code or the data changed, or a file is damaged.
        """
        self._begun.update(run=described, fingerprint=fingerprint)
        for folder in (self.path, self.path / "models"):
            for left_over in folder.glob(".*.tmp"):
                left_over.unlink()
        if not self._checkpoint.exists():
            self._rounds.unlink(missing_ok=True)
            (self.path / "result.json").unlink(missing_ok=True)
            write_atomically(self.path / _BEGUN, (json.dumps(self._begun, indent=1) + "\n").encode())
            return Saved(fingerprint)
        try:
            held, meta = unseal(self._checkpoint.read_bytes())
            if meta["format"] != _FORMAT:
                raise ResumeError(f"the checkpoint in {self.path} has format {meta['format']!r}, this version reads {_FORMAT}")
            extended = self._refuse_changes(meta, described)
            now, where = {"own": {}, **fingerprint}, f"the run in {self.path}"
            if earlier := check_fingerprint(meta["fingerprint"], now, where=where, accept_code=accept_code):
                fingerprint = {**fingerprint, "earlier": earlier}
            self._begun.update(fingerprint=fingerprint, extended=extended)
            state = {name: held["state"][name] for name in meta["names"]}
            server = ServerState(int(meta["round"]), state, held["server"])
            memory_rounds = {int(client_id): int(round) for client_id, round in meta["memory_rounds"].items()}
            callbacks = [(str(kind), dict(state)) for kind, state in meta.get("callbacks", ())]
            records = self._truncated(int(meta["rounds_bytes"]), meta["rounds_sha256"], server.round)
            return Saved(fingerprint, server, memory_rounds, records, callbacks, tuple(extended))
        except (DataError, KeyError, TypeError) as error:
            raise ResumeError(
                f"the checkpoint {self._checkpoint} is damaged: {error}; restore a copy of the folder, or start in another"
            ) from error

    def _refuse_changes(self, meta: Mapping[str, Any], described: Mapping[str, Any]) -> list[int]:
        """Return how many rounds the run had before it was given more, each time."""
        saved = dict(meta["run"])
        before, now = saved["config"]["rounds"], described["config"]["rounds"]
        extended = list(meta.get("extended", ()))
        if now > before == int(meta["round"]):
            # A finished run may go on.
            saved["config"] = {**saved["config"], "rounds": now}
            extended.append(before)
        changed = differences(_learned(saved), _learned(described))
        if changed:
            raise ResumeError(
                f"cannot resume the run in {self.path}, since options changed ({'; '.join(changed)});"
                " pass the options it was started with, or another folder. This holds for `rounds` too:"
                " a method may plan its course by the number of rounds; only a finished run may be given more"
            )
        return extended

    def _truncated(self, size: int, sha256: str, round: int) -> list[RoundRecord]:
        if not self._rounds.exists() or self._rounds.stat().st_size < size:
            raise ResumeError(
                f"{self._rounds} is shorter than the checkpoint of round {round} says; restore it or start afresh"
            )
        with self._rounds.open("rb+") as file:
            written = file.read(size)
            self._written = hashlib.sha256(written)
            if self._written.hexdigest() != sha256:
                raise ResumeError(
                    f"{self._rounds} is damaged: its checksum is not that of round {round}; bring back a copy of the folder, or"
                    " start afresh in another"
                )
            file.truncate(size)
        return [RoundRecord.from_dict(json.loads(line)) for line in written.decode().splitlines()]

    def append(self, record: RoundRecord) -> None:
        """Add a line to `rounds.jsonl`; it counts once the checkpoint that follows is on the disk."""
        line = (json.dumps(plain(record.to_dict()), allow_nan=False) + "\n").encode()
        self._written.update(line)
        with self._rounds.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def save(
        self, server: ServerState, memory_rounds: Mapping[int, int], callbacks: Sequence[tuple[str, dict[str, Any]]] = ()
    ) -> None:
        """Write the checkpoint, atomically."""
        meta = {
            **self._begun,
            "round": server.round,
            "names": list(server.state),
            "memory_rounds": {str(client_id): round for client_id, round in memory_rounds.items()},
            "rounds_bytes": self._rounds.stat().st_size,
            "rounds_sha256": self._written.hexdigest(),
            "callbacks": [list(pair) for pair in callbacks],
        }
        write_atomically(self._checkpoint, seal({"state": server.state, "server": server.memory}, **meta))


def _learned(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the bits of a run: all but how often it is scored."""
    config = {name: value for name, value in described["config"].items() if name not in _SCORING}
    return {**described, "config": config}


def _nothing_there(path: Path) -> str:
    siblings = [other.name for other in path.parent.iterdir() if holds_run(other)] if path.parent.is_dir() else []
    hint = f"; {nearest(path.name, siblings)}" if siblings else ""
    return f"{path} holds no run to go on with{hint}; mend its name, or leave resume=True (--resume) out to begin one there"
