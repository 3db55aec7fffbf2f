"""Decoded arrays, kept on disk so that pictures are decoded once; shared between processes as memory maps."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs

_log = logging.getLogger(__name__)

# Raised when the arrays change their meaning: older entries are then not found.
_FORMAT = 1

Arrays = dict[str, np.ndarray[Any, Any]]


def cache_directory() -> Path:
    """`$SPARSEKIT_CACHE` if set, else the folder where the system keeps caches.

    That is `~/.cache/sparsekit` (or below `$XDG_CACHE_HOME`) on Linux, `~/Library/Caches/sparsekit` on macOS and
    `%LOCALAPPDATA%\\sparsekit\\Cache` on Windows.

    Raises:
        RuntimeError: the user has no home.
    """
    given = os.environ.get("SPARSEKIT_CACHE")
    if given:
        return Path(given).expanduser()
    Path.home()  # raises where there is none, in place of a folder named `~`
    return platformdirs.user_cache_path("sparsekit", appauthor=False)


def cached_arrays(name: str, files: Sequence[Path], decode: Callable[[], Mapping[str, np.ndarray[Any, Any]]]) -> Arrays:
    """Arrays decoded from files, from the cache if these files were decoded before.

    A cache that cannot be read or written costs time, never the run.

    Args:
        name: The beginning of the entry's name.
        files: What the arrays are decoded from; their names, sizes and times of change are the key.
        decode: Makes the arrays; called only if the cache has none.

    Returns:
        Name → array. From the cache they are memory maps, copy-on-write: processes share the pages, files never change.
    """
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps([_FORMAT, name, stats]).encode()).hexdigest()[:20]
    try:
        entry: Path | None = cache_directory() / f"{name}-{key}"
    except RuntimeError:
        entry = None  # no home directory
    found = _read(entry)
    if found is not None:
        return found
    _log.info("decoding %s (%s), once", name, ", ".join(path.name for path in files))
    arrays = dict(decode())
    return _write(entry, arrays) or arrays


def _read(entry: Path | None) -> Arrays | None:
    if entry is None or not entry.is_dir():
        return None
    try:
        return {path.stem: np.load(path, mmap_mode="c", allow_pickle=False) for path in sorted(entry.glob("*.npy"))} or None
    except (OSError, ValueError, EOFError) as error:
        _log.warning("cache entry %s cannot be read (%s); decoding again", entry, error)
        shutil.rmtree(entry, ignore_errors=True)
        return None


def _write(entry: Path | None, arrays: Arrays) -> Arrays | None:
    if entry is None:
        return None
    staging = None
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
        for name, array in arrays.items():
            np.save(staging / f"{name}.npy", array, allow_pickle=False)
        os.replace(staging, entry)  # atomic; fails if another process was faster, whose entry is as good
    except OSError as error:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
        if not entry.is_dir():
            _log.info("decoded arrays are not kept: %s; set SPARSEKIT_CACHE to a writable directory", error)
    return _read(entry)
