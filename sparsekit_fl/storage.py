"""Files that are either old or new, never half-written; their content with a hash; and folders with one writer at a time."""

import contextlib
import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout

from sparsekit.errors import DataError
from sparsekit_fl.errors import FolderInUseError, MemoryStateError

# Windows cannot fsync directories.
_FOLDERS_OPEN = os.name != "nt"
_HASH_BYTES = 32


def sync_folder(folder: Path) -> None:
    """Wait until the names of the files in a folder are on the disk."""
    if not _FOLDERS_OPEN:
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, payload: bytes, *, durable: bool = True, sync: bool = True) -> None:
    """Write a file so that a crash leaves the old one or the new one.

    Args:
        path: The file; its folder must exist.
        payload: The content.
        durable: Wait until the bytes are on the disk, so that a power cut cannot lose them either.
        sync: Wait for the name too; False where many files are written and `sync_folder` is called once.
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


def lock_folder(folder: Path, *, wait_seconds: float = 0.0) -> BaseFileLock:
    """Keep other processes, and other runs of this one, from writing to a folder, until the lock is released.

    The system frees the lock when its process ends, however that ends; the file `.lock` stays and means nothing by itself.
    Worker processes do not inherit the lock.

    Args:
        folder: The folder; made if absent.
        wait_seconds: How long to wait for somebody else.

    Raises:
        FolderInUseError: somebody else has the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Not reentrant: a second run in this process would delete the files of the first one too.
    lock = FileLock(folder / ".lock", is_singleton=False)
    try:
        lock.acquire(timeout=wait_seconds)
    except Timeout:
        raise FolderInUseError(
            f"another run is writing to {folder}; wait until it has ended, end it, or choose another folder"
        ) from None
    return lock


def dumps(value: Any) -> bytes:
    """Return a value as what `torch.save` writes, after the SHA-256 of it.

    Args:
        value: Tensors, numbers, strings, None, and lists, tuples and dicts of these.

    Raises:
        MemoryStateError: it holds something else.
    """
    import torch  # drawing a report writes files too, and needs no torch

    buffer = io.BytesIO()
    torch.save(_checked(value, ""), buffer)
    payload = buffer.getvalue()
    return hashlib.sha256(payload).digest() + payload


def loads(payload: bytes) -> Any:
    """Undo `dumps`.

    Raises:
        DataError: the bytes are damaged, or come from elsewhere.
    """
    import torch

    if hashlib.sha256(payload[_HASH_BYTES:]).digest() != payload[:_HASH_BYTES]:
        raise DataError("it is damaged: its checksum does not match its content")
    return torch.load(io.BytesIO(payload[_HASH_BYTES:]), weights_only=True)


def _checked(value: Any, path: str) -> Any:
    """Return a value as it can be saved; a view of a larger tensor would bring the whole of it along."""
    import torch

    if isinstance(value, torch.Tensor):
        value = value.detach()
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple):
        return type(value)(_checked(item, f"{path}[{position}]") for position, item in enumerate(value))
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise MemoryStateError(f"memory {path or 'itself'} has the key {key!r}; keys must be strings or integers")
        return {key: _checked(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()}
    raise MemoryStateError(
        f"memory {path!r} holds a {type(value).__name__}; allowed are tensors, numbers, strings, None, and lists, tuples and"
        " dicts of these; convert it, for example with float() or torch.from_numpy()"
    )
