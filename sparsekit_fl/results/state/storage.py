"""Files that are either old or new, never half-written; and folders to which one process at a time writes."""

import contextlib
import os
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from sparsekit_fl.errors import FolderInUseError

# Windows opens no folder, and has the name of a file on the disk when it has the file there.
_FOLDERS_OPEN = os.name != "nt"


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
