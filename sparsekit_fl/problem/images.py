"""Image data sets: the digits of scikit-learn, and parquet files of the Hugging Face hub; decoded images are cached as uint8.

Each loader takes the user's data directory, or None to download from the hub. Missing or malformed files raise a DataError that
says how to get them.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from sparsekit.errors import DataError, require
from sparsekit.rng import torch_generator
from sparsekit_fl.checkpoint import write_atomically
from sparsekit_fl.problem.data import TensorData
from sparsekit_fl.problem.datasets import DataSource, datasets, find_files

_log = logging.getLogger(__name__)

_DIGITS_TRAIN = 1437  # the first four fifths
_VALIDATION = 0.1

Batches = DataLoader[tuple[Tensor, ...]]


def digits(root: Path | str | None = None) -> DataSource:  # noqa: ARG001 (every data set is loaded with a root)
    """Load the 1,797 handwritten digits of 8×8 pixels that come with scikit-learn; the last 360 are the test set."""
    bundle = require("sklearn.datasets").load_digits()
    pixels = np.rint(bundle.images * (255 / 16)).astype(np.uint8)[:, None]
    images, labels = torch.from_numpy(pixels), torch.from_numpy(bundle.target.astype(np.int64))
    train, test = (TensorData((images[part],), labels[part]) for part in (slice(_DIGITS_TRAIN), slice(_DIGITS_TRAIN, None)))
    return DataSource(name="digits", kind="image", train=train, test=test, classes=10, mean=(0.3054,), std=(0.3763,))


def _hub(name: str, row: Mapping[str, Any]) -> Callable[..., DataSource]:
    """Return a function that reads `<root>/<name>/**/*.parquet`, or the hub's copy, of a data set in `images.toml`."""

    def load(root: Path | str | None = None) -> DataSource:
        test = row.get("test", "test")
        layout, patterns = f"{name}/train.parquet and {name}/{test}.parquet", ("train*.parquet", f"{test}*.parquet")
        found = find_files(name, root, *patterns, layout=layout, repo=row["repo"], aliases=row.get("aliases", ()))
        pools = (
            cached_tensors(f"{name}-{split}", own, partial(read_images, own, tuple(row["shape"])))
            for split, own in zip(("train", "test"), found, strict=True)
        )
        learned, scored = (TensorData((pool["images"],), pool["labels"]) for pool in pools)
        known: dict[str, Any] = {"classes": row["classes"], "mean": tuple(row["mean"]), "std": tuple(row["std"])}
        return DataSource(name=name, kind="image", train=learned, test=scored, **known)

    load.__doc__ = row["about"]
    return load


_ROWS = tomllib.loads(files(__package__).joinpath("images.toml").read_text(encoding="utf-8"))
mnist, cifar10, cifar100, tiny_imagenet = (_hub(name, row) for name, row in _ROWS.items())


# Increase this number when the meaning of cached tensors changes, so that older files are ignored.
_FORMAT = 1


def cached_tensors(name: str, files: Sequence[Path], decode: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors decoded from files, or from the cache ($SPARSEKIT_CACHE) if it has files of these names, sizes and times.

    If the cache cannot be read or written, the run continues without it. Cached tensors are memory-mapped copy-on-write, so
    processes share them.
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


def read_images(files: Sequence[Path], shape: tuple[int, int, int]) -> dict[str, Tensor]:
    """Decode all images of parquet files: `images` uint8 (rows, C, H, W), `labels` int64 (rows,).

    The files need a column `image` or `img` (a struct of encoded `bytes`, or the bytes themselves) and a column `label` or
    `fine_label`. Raises DataError if a column is missing, or an image does not have the size in `shape` (C, H, W).
    """
    parquet, pillow = require("pyarrow.parquet"), require("PIL.Image")
    images, labels = [], []
    for path in files:
        try:
            table = parquet.read_table(path)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is not a readable parquet file: {error}; fetch it again") from error
        encoded = _column(table, ("image", "img"), path)
        decoded = np.empty((len(encoded), *shape), dtype=np.uint8)
        for row, cell in enumerate(encoded.to_pylist()):
            decoded[row] = _decode(pillow, cell["bytes"] if isinstance(cell, dict) else cell, shape, f"row {row} of {path}")
        images.append(decoded)
        labels.append(np.asarray(_column(table, ("label", "fine_label"), path).to_pylist(), dtype=np.int64))
    return {"images": torch.from_numpy(np.concatenate(images)), "labels": torch.from_numpy(np.concatenate(labels))}


def _column(table: Any, names: Sequence[str], path: Path) -> Any:
    found = next((name for name in names if name in table.column_names), None)
    if found is None:
        raise DataError(f"{path} has the columns {table.column_names}, expected one of {names}")
    return table[found]


def _decode(pillow: Any, encoded: Any, shape: tuple[int, int, int], what: str) -> np.ndarray[Any, Any]:
    try:
        picture = pillow.open(io.BytesIO(encoded))
        if picture.mode.startswith(("I", "F")):  # Pillow would clip it to white
            raise ValueError(f"it has more than 8 bits a channel (mode {picture.mode}); scale it to 8 bits first")
        pixels = np.asarray(picture.convert("L" if shape[0] == 1 else "RGB"))
    except (OSError, TypeError, ValueError, SyntaxError) as error:
        raise DataError(f"{what} is not an encoded picture, such as PNG: {error}") from error
    if pixels.shape[:2] != shape[1:]:
        raise DataError(f"{what} has {pixels.shape[1]}x{pixels.shape[0]} pixels, expected {shape[2]}x{shape[1]}")
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _loaders(name: str, *, data_dir: Path | None = None, batch_size: int = 64, seed: int = 0) -> tuple[Batches, Batches]:
    """Return training batches, reshuffled in each epoch, and validation batches, for commands without clients.

    A tenth of the training examples, drawn from `seed`, is for validation; the test set is not used.
    """
    train, _ = datasets[name](data_dir).pruning_data()
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(train)))
    held_out = max(1, int(_VALIDATION * len(order)))

    def batches(rows: Tensor, *, shuffle: bool) -> Batches:
        (images,), labels = train.batch(rows.sort().values)
        generator = torch_generator(np.random.default_rng(seed))
        return DataLoader(TensorDataset(images, labels), batch_size, shuffle=shuffle, generator=generator)

    return batches(order[held_out:], shuffle=True), batches(order[:held_out], shuffle=False)


digits_loaders, mnist_loaders, cifar10_loaders, cifar100_loaders, tiny_imagenet_loaders = (
    partial(_loaders, name) for name in ("digits", "mnist", "cifar10", "cifar100", "tiny-imagenet")
)
