"""ClientStore: client memories on disk, one file per client and round, so that a run holds only a round's clients."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from sparsekit.errors import DataError
from sparsekit_fl.context.memory import Memory
from sparsekit_fl.state.storage import flatten, sync_folder, unflatten, write_atomically
from sparsekit_fl.wire.packing import pack, unpack

__all__ = ["CarriedMemory", "ClientStore", "MemoryStore", "Versions"]

Versions = Mapping[int, int]
"""Client id → round in which its newest memory was written; clients without memory are absent."""


class MemoryStore(Protocol):
    """Where whoever trains a client finds its memory, and leaves it."""

    def read(self, client_id: int, round: int | None) -> Memory:
        """The memory of a client as written in `round`; empty for None."""
        ...

    def write(self, client_id: int, round: int, memory: Memory) -> bool:
        """Write a memory; returns False, and writes nothing, where it is empty."""
        ...


def _encode(client_id: int, round: int, memory: Memory) -> bytes:
    tensors, skeleton = flatten(memory)
    return pack(tensors, {"client": client_id, "round": round, "memory": skeleton})


def _decode(payload: bytes) -> Memory:
    tensors, meta = unpack(payload)
    try:
        memory = unflatten(tensors, meta["memory"])
    except KeyError as error:
        raise DataError(f"no memory of a client: {error} is missing") from error
    if not isinstance(memory, dict):
        raise DataError("no memory of a client: it must be a dict")
    return memory


class CarriedMemory:
    """The memory of one client that came with its message and goes back with the reply.

    Args:
        payload: As it came; empty for none.
    """

    def __init__(self, payload: bytes = b"") -> None:
        self._payload = payload
        self.written = b""

    def read(self, client_id: int, round: int | None) -> Memory:
        """What came.

        Raises:
            DataError: it is damaged, or none came although there is one.
        """
        if round is None:
            return {}
        if not self._payload:
            raise DataError(f"the memory of client {client_id} of round {round} did not come with its message")
        return _decode(self._payload)

    def write(self, client_id: int, round: int, memory: Memory) -> bool:
        """Keep it for the reply, as `written`.

        Raises:
            MemoryStateError: it holds something that cannot be saved.
        """
        if not any(memory.values()):
            return False
        self.written = _encode(client_id, round, memory)
        return True


class ClientStore:
    """Memories of the clients of one run. Whoever trained a client writes its memory; the runner decides which count.

    A file that no checkpoint names yet is harmless: training that client again writes the same bytes.

    Args:
        folder: Where the files are; made if absent.
        durable: Wait until files are on the disk; see `storage.write_atomically`.
    """

    def __init__(self, folder: Path, *, durable: bool) -> None:
        self.folder = folder
        self._durable = durable
        folder.mkdir(parents=True, exist_ok=True)

    def _path(self, client_id: int, round: int) -> Path:
        return self.folder / f"{client_id}-{round}.safetensors"

    def read(self, client_id: int, round: int | None) -> Memory:
        """The memory of a client as written in `round`; empty for None.

        Raises:
            DataError: the file is missing or damaged.
        """
        if round is None:
            return {}
        path = self._path(client_id, round)
        try:
            return _decode(path.read_bytes())
        except (OSError, DataError) as error:
            raise DataError(f"the memory of client {client_id} of round {round} cannot be read from {path}: {error}") from error

    def write(self, client_id: int, round: int, memory: Memory) -> bool:
        """Write a memory; returns False, and writes nothing, where it is empty.

        Raises:
            MemoryStateError: it holds something that cannot be saved.
        """
        if not any(memory.values()):
            return False
        self.save(client_id, round, _encode(client_id, round, memory))
        return True

    def has(self, client_id: int, round: int) -> bool:
        """Whether the memory of that round is here."""
        return self._path(client_id, round).exists()

    def load(self, client_id: int, round: int | None) -> bytes:
        """A memory as bytes, for `CarriedMemory`; empty where there is none."""
        path = None if round is None else self._path(client_id, round)
        return path.read_bytes() if path is not None and path.exists() else b""

    def save(self, client_id: int, round: int, payload: bytes) -> None:
        """Write what `CarriedMemory` brought."""
        write_atomically(self._path(client_id, round), payload, durable=self._durable, sync=False)

    def sync(self) -> None:
        """Wait until the names of the files are on the disk, where files must be durable; before a checkpoint names them."""
        if self._durable:
            sync_folder(self.folder)

    def remove(self, versions: Versions) -> None:
        """Remove the named files; those already gone are no error."""
        for client_id, round in versions.items():
            with contextlib.suppress(FileNotFoundError):
                self._path(client_id, round).unlink()

    def keep_only(self, versions: Versions) -> None:
        """Remove every file that is not named, such as those of a round that a crash cut off."""
        named = {self._path(client_id, round).name for client_id, round in versions.items()}
        for path in self.folder.glob("*.safetensors"):
            if path.name not in named:
                path.unlink()
        for path in self.folder.glob(".*.tmp"):
            path.unlink()
