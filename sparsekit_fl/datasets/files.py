"""Where the files of a data set are: in the user's directory, or fetched once from the hub."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from sparsekit.errors import DataError, MissingDependencyError, install_hint

_log = logging.getLogger(__name__)


def require(module: str, *, extra: str) -> ModuleType:
    """Import an optional package.

    Args:
        module: Its import name.
        extra: The extra of this project that brings it.

    Returns:
        The module.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"this needs the package {module.partition('.')[0]!r}, which cannot be imported ({error});"
            f" install it with: {install_hint(extra)}"
        ) from error


def find_folder(name: str, root: Path, *, aliases: Sequence[str] = (), layout: str) -> Path:
    """The folder of a data set under the user's data directory.

    Args:
        name: The data set.
        root: The data directory; a directory that itself bears the name of the data set is accepted too.
        aliases: Other spellings of the folder.
        layout: What should be inside, for the message.

    Returns:
        An existing folder.

    Raises:
        DataError: there is none.
    """
    root = root.expanduser()
    names = (name, *aliases)
    candidates: list[Path] = [root / spelling for spelling in names]
    if root.name in names:
        candidates.append(root)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    if not root.exists():
        raise DataError(f"data directory {str(root)!r} does not exist; it should hold {layout}")
    inside = sorted(path.name for path in root.iterdir() if path.is_dir())
    raise DataError(
        f"data set {name!r} is not in {str(root)!r}: expected {layout}, found the folders {inside[:20] or 'none'};"
        " correct --data-dir, or put the files there"
    )


def find_split_files(
    name: str, root: Path | None, *, repo: str, aliases: Sequence[str] = (), test_names: Sequence[str] = ("test",)
) -> tuple[list[Path], list[Path]]:
    """The parquet files of the training and the test split.

    Args:
        name: The data set.
        root: The user's data directory, in which `<name>/**/train*.parquet` is looked for; None to fetch the hub's copy.
        repo: The data set's id on the hub.
        aliases: Other spellings of the folder.
        test_names: How test files begin, in order of preference.

    Returns:
        Training files and test files, each sorted by name.

    Raises:
        DataError: files are missing, or cannot be fetched; the message says both ways to provide them.
    """
    layout = f"{name}/train.parquet and {name}/{test_names[0]}.parquet"
    if root is None:
        files = _fetch(name, repo, ("train", *test_names), layout)
    else:
        files = sorted(find_folder(name, root, aliases=aliases, layout=layout).rglob("*.parquet"))
    train = [path for path in files if path.name.startswith("train")]
    test = next((found for prefix in test_names if (found := [path for path in files if path.name.startswith(prefix)])), [])
    if not train or not test:
        where = f"hub data set {repo!r}" if root is None else f"{str(root)!r}"
        raise DataError(
            f"{where} has no complete data set {name!r}: expected {layout},"
            f" found {[path.name for path in files] or 'no parquet file'};"
            f" {_both_ways(repo, layout)}"
        )
    return train, test


def _both_ways(repo: str, layout: str) -> str:
    return (
        f"either pass --data-dir DIR with DIR/{layout} (the files of the hub data set {repo}),"
        f" or install the hub's client with {install_hint('hub')} and leave --data-dir out, on a machine with a network"
    )


def _fetch(name: str, repo: str, prefixes: Sequence[str], layout: str) -> list[Path]:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise DataError(
            f"no data for {name!r}: no data directory was given and nothing can be fetched; {_both_ways(repo, layout)}"
        ) from error
    try:
        _log.info("fetching %s from the hub data set %s (kept in the hub's cache)", name, repo)
        wanted = [
            path
            for path in hub.list_repo_files(repo, repo_type="dataset")
            if path.endswith(".parquet") and path.rpartition("/")[2].startswith(tuple(prefixes))
        ]
        return sorted(Path(hub.hf_hub_download(repo_id=repo, repo_type="dataset", filename=path)) for path in wanted)
    except Exception as error:
        # The hub's client raises many kinds, from requests' to its own; all mean that the copy cannot be had.
        raise DataError(f"cannot fetch {name!r} from the hub data set {repo}: {error}; {_both_ways(repo, layout)}") from error
