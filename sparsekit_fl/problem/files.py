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
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparsekit.errors import DataError, install_hint

_log = logging.getLogger(__name__)


def find_folder(name: str, root: Path | str | None, *, aliases: Sequence[str] = (), layout: str) -> Path:
    """Return the folder of a data set under the user's data directory.

    Args:
        name: The data set.
        root: The data directory; a directory that itself bears the name of the data set is accepted too. None is an error.
        aliases: Other spellings of the folder.
        layout: What should be inside, for the message.

    Raises:
        DataError: there is none.
    """
    if root is None:
        raise DataError(f"{name!r} has no copy on the hub that can be fetched; pass --data-dir DIR with DIR/{layout}")
    root, names = Path(root).expanduser(), (name, *aliases)
    candidates = [*(root / spelling for spelling in names), *([root] if root.name in names else [])]
    found = next(filter(Path.is_dir, candidates), None)
    if found is None:
        inside = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        raise DataError(
            f"data set {name!r} is not in {str(root)!r}: expected {layout}, found the folders {inside[:20] or 'none'};"
            " correct --data-dir, or put the files there"
        )
    return found


def find_split_files(
    name: str, root: Path | str | None, *, repo: str, aliases: Sequence[str] = (), test_names: Sequence[str] = ("test",)
) -> tuple[list[Path], list[Path]]:
    """Find the parquet files of the training and the test split, each sorted by name.

    Args:
        name: The data set.
        root: The user's data directory, in which `<name>/**/train*.parquet` is looked for; None to fetch the hub's copy.
        repo: The data set's id on the hub.
        aliases: Other spellings of the folder.
        test_names: How test files begin, in order of preference.

    Raises:
        DataError: files are missing, or cannot be fetched; the message says both ways to provide them.
    """
    layout = f"{name}/train.parquet and {name}/{test_names[0]}.parquet"
    both_ways = (
        f"either pass --data-dir DIR with DIR/{layout} (the files of the hub data set {repo}),"
        f" or install the hub's client with {install_hint('data')} and leave --data-dir out, on a machine with a network"
    )
    if root is None:
        _log.info("fetching the hub data set %s (kept in the hub's cache)", repo)
        wanted = [f"{folder}{prefix}*.parquet" for prefix in ("train", *test_names) for folder in ("", "*/")]
        try:
            hub = importlib.import_module("huggingface_hub")
            folder = Path(hub.snapshot_download(repo, repo_type="dataset", allow_patterns=wanted))
        except Exception as error:
            # The hub's client raises many kinds, from requests' to its own; all mean that the copy cannot be had.
            raise DataError(f"cannot fetch the hub data set {repo}: {error}; {both_ways}") from error
    else:
        folder = find_folder(name, root, aliases=aliases, layout=layout)
    files = sorted(folder.rglob("*.parquet"))
    train, *tests = ([path for path in files if path.name.startswith(prefix)] for prefix in ("train", *test_names))
    test = next(filter(None, tests), [])
    if not train or not test:
        raise DataError(
            f"{str(root or repo)!r} has no complete data set {name!r}: expected {layout},"
            f" found {[path.name for path in files] or 'no parquet file'}; {both_ways}"
        )
    return train, test


# Raised when the tensors change their meaning: older entries are then not found.
_FORMAT = 1


def cached_tensors(name: str, files: Sequence[Path], decode: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors decoded from files, from the cache if these files were decoded before.

    The cache is `$SPARSEKIT_CACHE`, or the folder where the system keeps caches. One that cannot be read or written costs
    time, never the run.

    Args:
        name: The beginning of the entry's name.
        files: What the tensors are decoded from; their names, sizes and times of change are the key.
        decode: Makes the tensors; called only if the cache has none.

    Returns:
        Name → tensor. From the cache they are maps of the file, copy-on-write: processes share the pages, files never change.
    """
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps([_FORMAT, name, stats]).encode()).hexdigest()[:20]
    given = os.environ.get("SPARSEKIT_CACHE") or platformdirs.user_cache_path("sparsekit", appauthor=False)
    try:
        entry = Path(given).expanduser() / f"{name}-{key}.safetensors"
    except RuntimeError:  # no home directory
        return decode()
    with contextlib.suppress(OSError, SafetensorError):
        return dict(load_file(entry))
    _log.info("decoding %s (%s), once", name, ", ".join(path.name for path in files))
    tensors = decode()
    staging = entry.with_name(f".{entry.name}.{os.getpid()}")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, staging)
        staging.replace(entry)
        return dict(load_file(entry))
    except (OSError, SafetensorError) as error:
        _log.info("what was decoded is not kept: %s; set SPARSEKIT_CACHE to a writable directory", error)
        with contextlib.suppress(OSError):
            staging.unlink()
        return tensors
