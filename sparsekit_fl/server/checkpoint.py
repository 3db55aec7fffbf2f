"""Checkpoint: everything that a run needs to go on after its last finished round, to the same bits.

It stands beside the server and not in `state/`, since records of rounds, which it holds, stand above that folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsekit.errors import DataError
from sparsekit_fl.client.spec import RunSpec
from sparsekit_fl.errors import ResumeError
from sparsekit_fl.options.config import current_names
from sparsekit_fl.problem.clients import Client
from sparsekit_fl.results.records import RoundRecord, plain
from sparsekit_fl.server.server import ServerState
from sparsekit_fl.state.storage import flatten, unflatten, write_atomically
from sparsekit_fl.wire.packing import pack, unpack

__all__ = ["RunFolder", "Saved", "describe_run", "differences"]

_FORMAT = 1


def describe_run(spec: RunSpec, clients: Mapping[int, Client], experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that must be equal for a run to be resumed, as plain JSON values."""
    sizes = [[c.id, len(c.data.train), len(c.data.val), len(c.data.test)] for c in clients.values()]
    shapes = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in spec.initial.items()]
    groups = [list(pair) for pair in spec.graph.fingerprint()]

    def sha(value: Any) -> str:
        return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]

    described = {
        "method": spec.method.describe(),
        "config": spec.config.to_dict(),
        "experiment": dict(experiment),
        "clients": {"count": len(clients), "sizes": sha(sizes)},
        "model": {"entries": len(shapes), "shapes": sha(shapes), "units": sha(groups)},
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
    """The content of a checkpoint.

    Args:
        server: The server after the last finished round.
        versions: Client id → round of its newest memory.
        records: One per finished round.
    """

    server: ServerState
    versions: dict[int, int]
    records: list[RoundRecord]


class RunFolder:
    """The files of a run: `checkpoint.safetensors`, `rounds.jsonl`, `clients/`, `models/`, `result.json`.

    Args:
        path: The folder; made if absent.
        described: What must be equal to resume the run, from `describe_run`.
    """

    def __init__(self, path: Path, described: Mapping[str, Any]) -> None:
        self.path = path
        self._described = described
        path.mkdir(parents=True, exist_ok=True)
        self._rounds = path / "rounds.jsonl"
        self._checkpoint = path / "checkpoint.safetensors"

    def start(self, *, resume: bool) -> Saved | None:
        """Load what was saved, or make sure that nothing was.

        Args:
            resume: Go on from the checkpoint, if there is one.

        Returns:
            What was saved; None to start afresh.

        Raises:
            ResumeError: the folder holds a run and `resume` is False, or an option changed, or a file is damaged.
        """
        for folder in (self.path, self.path / "models"):
            for left_over in folder.glob(".*.tmp"):
                left_over.unlink()
        exists = self._checkpoint.exists()
        if exists and not resume:
            raise ResumeError(
                f"{self.path} already holds a run; go on with it by resume=True (--resume), or choose another folder"
            )
        if not exists:
            self._rounds.unlink(missing_ok=True)
            (self.path / "result.json").unlink(missing_ok=True)
            return None
        try:
            tensors, meta = unpack(self._checkpoint.read_bytes())
            if meta["format"] != _FORMAT:
                raise ResumeError(f"the checkpoint in {self.path} has format {meta['format']!r}, this version reads {_FORMAT}")
            self._refuse_changes(meta["run"])
            state = {name[6:]: tensor for name, tensor in tensors.items() if name.startswith("state:")}
            server = ServerState(
                int(meta["round"]),
                {name: state[name] for name in meta["names"]},
                unflatten(tensors, meta["memory"]),
                meta.get("noise_seed"),
            )
            versions = {int(client_id): int(round) for client_id, round in meta["versions"].items()}
            return Saved(server, versions, self._truncated(int(meta["rounds_bytes"]), server.round))
        except (DataError, KeyError, TypeError) as error:
            raise ResumeError(f"the checkpoint in {self.path} is damaged: {error}; start afresh in another folder") from error

    def _refuse_changes(self, saved: Mapping[str, Any]) -> None:
        changed = differences({**saved, "config": current_names(saved["config"])}, self._described)
        if changed:
            raise ResumeError(
                f"cannot resume the run in {self.path}, since options changed ({'; '.join(changed)});"
                " pass the options it was started with, or another folder. This holds for `rounds` too:"
                " a method may plan its course by the number of rounds"
            )

    def _truncated(self, size: int, round: int) -> list[RoundRecord]:
        if not self._rounds.exists() or self._rounds.stat().st_size < size:
            raise ResumeError(
                f"{self._rounds} is shorter than the checkpoint of round {round} says; restore it or start afresh"
            )
        with self._rounds.open("rb+") as file:
            lines = file.read(size).decode().splitlines()
            file.truncate(size)
        return [RoundRecord.from_dict(json.loads(line)) for line in lines]

    def append(self, record: RoundRecord) -> None:
        """Add a line to `rounds.jsonl`; it counts once the checkpoint that follows is on the disk."""
        with self._rounds.open("ab") as file:
            file.write((json.dumps(plain(record.to_dict()), allow_nan=False) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())

    def save(self, server: ServerState, versions: Mapping[int, int]) -> None:
        """Write the checkpoint, atomically."""
        tensors, skeleton = flatten(server.memory)
        meta = {
            "format": _FORMAT,
            "run": self._described,
            "round": server.round,
            "names": list(server.state),
            "memory": skeleton,
            "versions": {str(client_id): round for client_id, round in versions.items()},
            "rounds_bytes": self._rounds.stat().st_size,
            **({} if server.noise_seed is None else {"noise_seed": server.noise_seed}),
        }
        state = {f"state:{name}": tensor for name, tensor in server.state.items()}
        write_atomically(self._checkpoint, pack({**tensors, **state}, meta))
