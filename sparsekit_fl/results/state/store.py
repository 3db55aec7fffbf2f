"""What outlives a round, as bytes; and MemoryStore: memories of clients, one version per client and round."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from sparsekit.errors import DataError
from sparsekit_fl.client.context import Memory
from sparsekit_fl.client.packing import checksum, pack, unpack
from sparsekit_fl.errors import LostMemoryError, MemoryStateError
from sparsekit_fl.results.state.storage import sync_folder, write_atomically

_TENSOR = "$tensor"
_FLOAT = "$float"

MemoryRounds = Mapping[int, int]
"""Client id → round in which its newest memory was written; clients without memory are absent."""


def flatten(memory: Mapping[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Split memory into numbered tensors and a JSON skeleton that says where each goes.

    Raises:
        MemoryStateError: something that is no tensor, number, string, None, list or string-keyed dict of these.
    """
    tensors: dict[str, Tensor] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            name = f"t{len(tensors)}"
            tensors[name] = value.detach()
            return {_TENSOR: name}
        if isinstance(value, float) and not math.isfinite(value):
            return {_FLOAT: repr(value)}
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, list | tuple):
            return [walk(item, f"{path}[{place}]") for place, item in enumerate(value)]
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str) or key in (_TENSOR, _FLOAT):
                    raise MemoryStateError(
                        f"memory {path or 'itself'} has the key {key!r}; keys must be strings, so pass str(id)"
                    )
            return {key: walk(item, f"{path}.{key}" if path else key) for key, item in value.items()}
        raise MemoryStateError(
            f"memory {path!r} holds a {type(value).__name__}; allowed are tensors, numbers, strings, None, and lists and"
            " dicts of these; convert it, for example with float() or torch.from_numpy()"
        )

    return tensors, walk(memory, "")


def unflatten(tensors: Mapping[str, Tensor], skeleton: Any) -> Any:
    """Undo `flatten`; tuples come back as lists.

    Raises:
        DataError: the skeleton names a tensor that is not there.
    """
    if isinstance(skeleton, dict):
        if _TENSOR in skeleton:
            if skeleton[_TENSOR] not in tensors:
                raise DataError(f"saved memory lacks the tensor {skeleton[_TENSOR]!r}; the file is damaged")
            return tensors[skeleton[_TENSOR]]
        if _FLOAT in skeleton:
            return float(skeleton[_FLOAT])
        return {key: unflatten(tensors, item) for key, item in skeleton.items()}
    if isinstance(skeleton, list):
        return [unflatten(tensors, item) for item in skeleton]
    return skeleton


def seal(memory: Mapping[str, Any], **said: Any) -> bytes:
    """Return a memory and further JSON values as one file, with a checksum: a reader believes any number that it finds.

    Raises:
        MemoryStateError: the memory holds something that cannot be saved.
    """
    tensors, skeleton = flatten(memory)
    meta = {**said, "memory": skeleton}
    return pack(tensors, {**meta, "checksum": checksum(tensors, meta)})


def unseal(payload: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Undo `seal`: the memory, and the further values.

    Raises:
        DataError: the bytes are damaged, or no such file.
    """
    tensors, meta = unpack(payload)
    if meta.pop("checksum", None) != checksum(tensors, meta):
        raise DataError("it is damaged: its checksum is not that of what it holds")
    memory = unflatten(tensors, meta.pop("memory", None))
    if not isinstance(memory, dict):
        raise DataError("it holds no memory, which must be a dict")
    return memory, meta


class MemoryStore:
    """Memories of clients. Here that of one, which came with its message and goes back with the reply; subclasses keep files.

    Args:
        payload: The memory as it came; empty for none.

    Attributes:
        written: What goes back; empty where memories are kept in files.
    """

    failure: type[DataError] = DataError

    def __init__(self, payload: bytes = b"") -> None:
        self._payload = payload
        self.written = b""

    def where(self, client_id: int, round: int) -> Path | str:  # noqa: ARG002
        """Return where a memory is, for errors."""
        return "its message"

    def load(self, client_id: int, round: int) -> bytes:  # noqa: ARG002
        """Return the bytes of a memory.

        Raises:
            OSError, DataError: they are missing or damaged.
        """
        if not self._payload:
            raise DataError("it did not come")
        return self._payload

    def save(self, client_id: int, round: int, payload: bytes) -> None:  # noqa: ARG002
        """Keep the bytes of a memory."""
        self.written = payload

    def read(self, client_id: int, round: int | None) -> Memory:
        """Return the memory of a client as written in `round`; empty for None.

        Raises:
            DataError: it is missing or damaged.
        """
        if round is None:
            return {}
        try:
            memory, meta = unseal(self.load(client_id, round))
            if (meta.get("client"), meta.get("round")) != (client_id, round):
                raise DataError(f"it is that of client {meta.get('client')} of round {meta.get('round')}")
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
        self.save(client_id, round, seal(memory, client=client_id, round=round))
        return True


class ClientStore(MemoryStore):
    """Memories of the clients of one run, as files. Whoever trained a client writes its memory; the loop decides which count.

    A file that no checkpoint names yet is harmless: training that client again writes the same bytes.

    Args:
        folder: Where the files are; made if absent.
        durable: Wait until files are on the disk; see `storage.write_atomically`.
    """

    def __init__(self, folder: Path, *, durable: bool) -> None:
        super().__init__()
        self.folder = folder
        self.durable = durable
        folder.mkdir(parents=True, exist_ok=True)

    def where(self, client_id: int, round: int) -> Path:
        return self.folder / f"{client_id}-{round}.safetensors"

    def load(self, client_id: int, round: int) -> bytes:
        return self.where(client_id, round).read_bytes()

    def save(self, client_id: int, round: int, payload: bytes) -> None:
        """Write the file; `sync` makes its name durable."""
        write_atomically(self.where(client_id, round), payload, durable=self.durable, sync=False)

    def sync(self) -> None:
        """Wait until the names of the files are on the disk, where files must be durable; before a checkpoint names them."""
        if self.durable:
            sync_folder(self.folder)

    def remove(self, memory_rounds: MemoryRounds) -> None:
        """Remove the named files; those already gone are no error."""
        for client_id, round in memory_rounds.items():
            self.where(client_id, round).unlink(missing_ok=True)

    def keep_only(self, memory_rounds: MemoryRounds) -> None:
        """Remove every file that is not named, such as those of a round that a crash cut off."""
        named = {self.where(client_id, round).name for client_id, round in memory_rounds.items()}
        for path in [*self.folder.glob("*.safetensors"), *self.folder.glob(".*.tmp")]:
            if path.name not in named:
                path.unlink()


class DeviceStore(ClientStore):
    """Memories of the clients of one device and one run, as durable files; a damaged one is lost.

    Two memories of a client are kept: the newest, and the one that the server asked for when that was written. The server may
    never get the reply that the newest belongs to, and then asks for the same one again.

    Args:
        folder: Where the files are; made if absent.
    """

    failure = LostMemoryError

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, durable=True)
        self._asked: dict[int, int] = {}

    def load(self, client_id: int, round: int) -> bytes:
        payload = super().load(client_id, round)
        self._asked[client_id] = round
        return payload

    def save(self, client_id: int, round: int, payload: bytes) -> None:
        """Write the file, and remove all but the two that may be asked for."""
        super().save(client_id, round, payload)
        self.sync()
        older = {int(file.stem.partition("-")[2]) for file in self.folder.glob(f"{client_id}-*.safetensors")} - {round}
        kept = self._asked.get(client_id, max(older, default=round))
        for stale in older - {kept}:
            self.remove({client_id: stale})
