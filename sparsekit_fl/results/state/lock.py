"""FolderLock: one process at a time writes to a folder."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

from sparsekit_fl.errors import FolderInUseError

_NAME = ".lock"


class FolderLock:
    """Keeps other processes, and other runs of this one, from writing to a folder.

    The system frees the lock when its process ends, however that ends; the file `.lock` stays and means nothing by itself.
    Worker processes do not inherit the lock.

    Args:
        folder: The folder; made if absent.
        what: What is written there, for the message.

    Raises:
        FolderInUseError: somebody else has the lock.
    """

    def __init__(self, folder: Path, *, what: str = "run") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Not reentrant: a second run in this process would delete the files of the first one too.
        self._lock = FileLock(folder / _NAME, timeout=0, is_singleton=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise FolderInUseError(
                f"another {what} is writing to {folder}; wait until it has ended, end it, or choose another folder"
            ) from None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let others write; a second call does nothing."""
        self._lock.release(force=True)
