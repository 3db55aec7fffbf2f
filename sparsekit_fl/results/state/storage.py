"""Memory as tensors plus JSON; and files that are either old or new, never half-written."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsekit.errors import DataError
from sparsekit_fl.errors import MemoryStateError

if TYPE_CHECKING:
    from torch import Tensor

_TENSOR = "$tensor"
_FLOAT = "$float"
# Windows opens no folder, and has the name of a file on the disk when it has the file there.
_FOLDERS_OPEN = os.name != "nt"
_OWNER_ALONE = 0o600


def sync_folder(folder: Path) -> None:
    """Wait until the names of the files in a folder are on the disk."""
    if not _FOLDERS_OPEN:
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, payload: bytes, *, durable: bool = True, sync: bool = True, private: bool = False) -> None:
    """Write a file so that a crash leaves the old one or the new one.

    Args:
        path: The file; its folder must exist.
        payload: The content.
        durable: Wait until the bytes are on the disk, so that a power cut cannot lose them either.
        sync: Wait for the name too; False where many files are written and `sync_folder` is called once.
        private: Only the owner may read the file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=_open_private if private else None) as file:
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


def _open_private(path: str, flags: int) -> int:
    """Open a file that nobody else may read, also where one of that name was there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, flags, _OWNER_ALONE)


def flatten(memory: Mapping[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Split memory into numbered tensors and a JSON skeleton that says where each goes.

    Raises:
        MemoryStateError: something that is no tensor, number, string, None, list or string-keyed dict of these.
    """
    # Imported here, since reports write files too and need no torch.
    from torch import Tensor

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
