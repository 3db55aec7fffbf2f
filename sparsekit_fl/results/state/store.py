"""MemoryStore: memories of clients, one version per client and round: in a run's folder, on a device, or in a message."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from sparsekit.errors import DataError
from sparsekit_fl.client.memory import Memory
from sparsekit_fl.client.packing import checksum, pack, unpack
from sparsekit_fl.errors import LostMemoryError
from sparsekit_fl.results.state.storage import flatten, sync_folder, unflatten, write_atomically

Versions = Mapping[int, int]
"""Client id → round in which its newest memory was written; clients without memory are absent."""


class MemoryStore(ABC):
    """Memories of clients. Subclasses say where the bytes are; what the bytes mean is here."""

    failure: type[DataError] = DataError

    @abstractmethod
    def where(self, client_id: int, round: int) -> Path | str:
        """Return where a memory is, for errors."""

    @abstractmethod
    def load(self, client_id: int, round: int) -> bytes:
        """Return the bytes of a memory.

        Raises:
            OSError, DataError: they are missing or damaged.
        """

    @abstractmethod
    def save(self, client_id: int, round: int, payload: bytes) -> None:
        """Keep the bytes of a memory."""

    def read(self, client_id: int, round: int | None) -> Memory:
        """Return the memory of a client as written in `round`; empty for None.

        Raises:
            DataError: it is missing or damaged.
        """
        if round is None:
            return {}
        try:
            tensors, meta = unpack(self.load(client_id, round))
            if meta.pop("checksum", None) != checksum(tensors, meta):
                raise DataError("it is damaged: its checksum is not that of what it holds")
            if (meta.get("client"), meta.get("round")) != (client_id, round):
                raise DataError(f"it is that of client {meta.get('client')} of round {meta.get('round')}")
            memory = unflatten(tensors, meta.get("memory"))
            if not isinstance(memory, dict):
                raise DataError("it is no memory, which must be a dict")
        except (OSError, DataError) as error:
            where = self.where(client_id, round)
            raise self.failure(
                f"the memory of client {client_id} of round {round} cannot be read from {where}: {error}"
            ) from error
        return memory

    def write(self, client_id: int, round: int, memory: Memory) -> bool:
        """Write a memory; returns False, and writes nothing, where it is empty.

        Raises:
            MemoryStateError: it holds something that cannot be saved.
        """
        if not any(memory.values()):
            return False
        tensors, skeleton = flatten(memory)
        meta = {"client": client_id, "round": round, "memory": skeleton}
        self.save(client_id, round, pack(tensors, {**meta, "checksum": checksum(tensors, meta)}))
        return True


class CarriedMemory(MemoryStore):
    """The memory of one client that came with its message and goes back with the reply.

    Args:
        payload: As it came; empty for none.
    """

    def __init__(self, payload: bytes = b"") -> None:
        self._payload = payload
        self.written = b""

    def where(self, client_id: int, round: int) -> str:  # noqa: ARG002
        """Name the message."""
        return "its message"

    def load(self, client_id: int, round: int) -> bytes:  # noqa: ARG002
        """Return what came."""
        if not self._payload:
            raise DataError("it did not come")
        return self._payload

    def save(self, client_id: int, round: int, payload: bytes) -> None:  # noqa: ARG002
        """Keep it for the reply, as `written`."""
        self.written = payload


class ClientStore(MemoryStore):
    """Memories of the clients of one run, as files. Whoever trained a client writes its memory; the loop decides which count.

    A file that no checkpoint names yet is harmless: training that client again writes the same bytes.

    Args:
        folder: Where the files are; made if absent.
        durable: Wait until files are on the disk; see `storage.write_atomically`.
    """

    def __init__(self, folder: Path, *, durable: bool) -> None:
        self.folder = folder
        self.durable = durable
        folder.mkdir(parents=True, exist_ok=True)

    def where(self, client_id: int, round: int) -> Path:
        """Return the path of the file."""
        return self.folder / f"{client_id}-{round}.safetensors"

    def load(self, client_id: int, round: int) -> bytes:
        """Read the file."""
        return self.where(client_id, round).read_bytes()

    def save(self, client_id: int, round: int, payload: bytes) -> None:
        """Write the file; `sync` makes its name durable."""
        write_atomically(self.where(client_id, round), payload, durable=self.durable, sync=False)

    def sync(self) -> None:
        """Wait until the names of the files are on the disk, where files must be durable; before a checkpoint names them."""
        if self.durable:
            sync_folder(self.folder)

    def remove(self, versions: Versions) -> None:
        """Remove the named files; those already gone are no error."""
        for client_id, round in versions.items():
            self.where(client_id, round).unlink(missing_ok=True)

    def keep_only(self, versions: Versions) -> None:
        """Remove every file that is not named, such as those of a round that a crash cut off."""
        named = {self.where(client_id, round).name for client_id, round in versions.items()}
        for path in [*self.folder.glob("*.safetensors"), *self.folder.glob(".*.tmp")]:
            if path.name not in named:
                path.unlink()


class DeviceStore(MemoryStore):
    """Memories of the clients of one device and one run, as files; a damaged one is lost.

    Two memories of a client are kept: the newest, and the one that the server asked for when that was written. The server may
    never get the reply that the newest belongs to, and then asks for the same one again.

    Args:
        folder: Where the files are; made if absent.
    """

    failure = LostMemoryError

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._asked: dict[int, int] = {}

    def where(self, client_id: int, round: int) -> Path:
        """Return the path of the file."""
        return self._folder / f"client-{client_id}" / f"{round}.memory"

    def load(self, client_id: int, round: int) -> bytes:
        """Read the file."""
        payload = self.where(client_id, round).read_bytes()
        self._asked[client_id] = round
        return payload

    def save(self, client_id: int, round: int, payload: bytes) -> None:
        """Write the file durably, and remove all but the two that may be asked for."""
        path = self.where(client_id, round)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, payload)
        older = {int(file.stem) for file in path.parent.glob("*.memory")} - {round}
        kept = self._asked.get(client_id, max(older, default=round))
        for stale in older - {kept}:
            self.where(client_id, stale).unlink(missing_ok=True)
