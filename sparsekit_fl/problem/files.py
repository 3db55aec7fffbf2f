"""Where the files of a data set are: in the user's directory, or fetched once from the hub; decoded images are kept."""

import contextlib
import hashlib
import importlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import platformdirs
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from sparsekit.errors import DataError, install_hint
from sparsekit_fl.checkpoint import write_atomically

_log = logging.getLogger(__name__)


def find_files(
    name: str, root: Path | str | None, *patterns: str, layout: str, repo: str = "", aliases: Sequence[str] = ()
) -> list[list[Path]]:
    """Return the files of a data set for each pattern, sorted: from the user's data directory, or from the hub without `root`.

    `layout` describes the expected files in errors, `repo` is the id of the data set on the hub, and `aliases` are other names
    of its folder. If files are missing, a DataError says how to provide them.
    """
    ways = f"pass --data-dir DIR with DIR/{layout}"
    if repo:
        ways = (
            f"either {ways} (the files of the hub data set {repo}), or, on a machine with a network, leave --data-dir out and"
            f" install the hub's client: {install_hint('huggingface_hub')}"
        )
    if root is not None:
        root, names = Path(root).expanduser(), (name, *aliases)
        folders = [*(root / spelling for spelling in names), *([root] if root.name in names else [])]
        folder = next(filter(Path.is_dir, folders), folders[0])
    elif not repo:
        raise DataError(f"{name!r} has no copy on the hub that can be fetched; {ways}")
    else:
        _log.info("fetching the hub data set %s (kept in the hub's cache)", repo)
        wanted = [folder + pattern for pattern in patterns for folder in ("", "*/")]
        try:
            hub = importlib.import_module("huggingface_hub")
            folder = Path(hub.snapshot_download(repo, repo_type="dataset", allow_patterns=wanted))
        except Exception as error:
            # The hub's client raises many kinds, from requests' to its own; all mean that the copy cannot be had.
            raise DataError(f"cannot fetch the hub data set {repo}: {error}; {ways}") from error
    found = [sorted(folder.rglob(pattern)) for pattern in patterns]
    if not all(found):
        there = sorted(path.name for path in folder.rglob("*") if path.is_file())[:20]
        raise DataError(f"{str(folder)!r} does not hold the data set {name!r}: found {there or 'no file'}; {ways}")
    return found


# Raised when the tensors change their meaning: older entries are then not found.
_FORMAT = 1


def cached_tensors(name: str, files: Sequence[Path], decode: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors decoded from files, or from the cache ($SPARSEKIT_CACHE) if these names, sizes and times are known.

    If the cache cannot be read or written, the run continues without it. Cached tensors are copy-on-write maps, which processes
    share.
    """
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps([_FORMAT, name, stats]).encode()).hexdigest()[:20]
    given = os.environ.get("SPARSEKIT_CACHE") or platformdirs.user_cache_path("sparsekit", appauthor=False)
    entry = Path(given).expanduser() / f"{name}-{key}.safetensors"
    with contextlib.suppress(OSError, SafetensorError):
        return dict(load_file(entry))
    _log.info("decoding %s (%s), once", name, ", ".join(path.name for path in files))
    tensors = decode()
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(entry, save(tensors), durable=False)
        return dict(load_file(entry))
    except (OSError, SafetensorError) as error:
        _log.info("the decoded data are not cached: %s; set SPARSEKIT_CACHE to a writable directory", error)
        return tensors
