"""NodeStore: client memories on a device, each file with its digest, so that a damaged one is known as lost."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sparsekit.errors import DataError
from sparsekit_fl.context.memory import Memory
from sparsekit_fl.errors import LostMemoryError
from sparsekit_fl.state.storage import sync_folder, write_atomically
from sparsekit_fl.state.store import CarriedMemory

__all__ = ["NodeStore"]

_DIGEST_BYTES = 32


class NodeStore:
    """Memories of the clients of one node and one run.

    Of a client two are kept: the newest, and the one that the server asked for when that was written. It may not get the
    reply that the newest belongs to, however often, and then asks for the same one again.

    Args:
        folder: Where; made if absent.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._asked: dict[int, int] = {}

    def _path(self, client_id: int, round: int) -> Path:
        return self._folder / f"client-{client_id}" / f"{round}.memory"

    def read(self, client_id: int, round: int | None) -> Memory:
        """The memory of a client as written in `round`; empty for None.

        Raises:
            LostMemoryError: the file is missing or damaged.
        """
        if round is None:
            return {}
        path = self._path(client_id, round)
        try:
            raw = path.read_bytes()
            digest, payload = raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:]
            if hashlib.sha256(payload).digest() != digest:
                raise DataError("its digest is wrong")
            memory = CarriedMemory(payload).read(client_id, round)
            self._asked[client_id] = round
            return memory
        except (OSError, DataError) as error:
            raise LostMemoryError(
                f"the memory of client {client_id} of round {round} cannot be read from {path}: {error}"
            ) from error

    def write(self, client_id: int, round: int, memory: Memory) -> bool:
        """Write a memory durably; returns False, and writes nothing, where it is empty.

        Raises:
            MemoryStateError: it holds something that cannot be saved.
        """
        carried = CarriedMemory()
        if not carried.write(client_id, round, memory):
            return False
        path = self._path(client_id, round)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, hashlib.sha256(carried.written).digest() + carried.written)
        sync_folder(path.parent)
        older = sorted({int(file.stem) for file in path.parent.glob("*.memory")} - {round}, reverse=True)
        kept = self._asked.get(client_id, older[0] if older else round)
        for stale in older:
            if stale != kept:
                self._path(client_id, stale).unlink(missing_ok=True)
        return True
