"""Pictures and labels from parquet files in the layout of the hub's image data sets."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsekit.errors import DataError
from sparsekit_fl.datasets.base import DataSource
from sparsekit_fl.datasets.cache import cached_arrays
from sparsekit_fl.datasets.files import find_split_files, require
from sparsekit_fl.problem.data import TensorData

__all__ = ["load_images", "read_images"]

_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "fine_label")
_MODES = {1: "L", 3: "RGB"}


def load_images(
    name: str,
    root: Path | None,
    *,
    repo: str,
    shape: tuple[int, int, int],
    classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    aliases: Sequence[str] = (),
    test_names: Sequence[str] = ("test",),
) -> DataSource:
    """An image data set from `<root>/<name>/*.parquet`, or from the hub.

    Args:
        name: The data set.
        root: The user's data directory; None to fetch the hub's copy.
        repo: Its id on the hub.
        shape: `(C, H, W)` of every picture; other modes are converted, other sizes are an error.
        classes: Labels are in [0, classes).
        mean: Per channel, in [0, 1].
        std: Likewise.
        aliases: Other spellings of the folder.
        test_names: How test files begin.

    Returns:
        The source; pictures stay uint8, in one array that all clients share.

    Raises:
        DataError: files are missing or malformed.
        MissingDependencyError: pyarrow or Pillow is not installed.
    """
    splits = find_split_files(name, root, repo=repo, aliases=aliases, test_names=test_names)
    pools = []
    for split, files in zip(("train", "test"), splits, strict=True):
        arrays = cached_arrays(f"{name}-{split}", files, lambda files=files: read_images(files, shape))  # type: ignore[misc]
        pools.append(TensorData((torch.from_numpy(arrays["images"]),), torch.from_numpy(arrays["labels"])))
    return DataSource(name=name, kind="image", train=pools[0], test=pools[1], classes=classes, mean=mean, std=std)


def read_images(files: Sequence[Path], shape: tuple[int, int, int]) -> dict[str, np.ndarray[Any, Any]]:
    """Decode all pictures of some parquet files.

    Args:
        files: With a column `image` or `img` (a struct of encoded `bytes`, or the bytes themselves) and a column `label`
            or `fine_label`.
        shape: `(C, H, W)` to come out.

    Returns:
        `images` uint8 `(rows, C, H, W)` and `labels` int64 `(rows,)`.

    Raises:
        DataError: a column is missing, a file is damaged, or a picture has another size.
    """
    parquet, pillow = require("pyarrow.parquet", extra="fl"), require("PIL.Image", extra="fl")
    images: list[np.ndarray[Any, Any]] = []
    labels: list[np.ndarray[Any, Any]] = []
    for path in files:
        try:
            table = parquet.ParquetFile(path)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is not a readable parquet file: {error}; fetch it again") from error
        columns = table.schema_arrow.names
        image_column = _pick(columns, _IMAGE_COLUMNS, path)
        label_column = _pick(columns, _LABEL_COLUMNS, path)
        decoded = np.empty((table.metadata.num_rows, *shape), dtype=np.uint8)
        row = 0
        for batch in table.iter_batches(batch_size=2048, columns=[image_column, label_column]):
            for cell in batch.column(image_column).to_pylist():
                decoded[row] = _decode(pillow, cell["bytes"] if isinstance(cell, dict) else cell, shape, f"row {row} of {path}")
                row += 1
            labels.append(np.asarray(batch.column(label_column).to_pylist(), dtype=np.int64))
        images.append(decoded)
    return {"images": images[0] if len(images) == 1 else np.concatenate(images), "labels": np.concatenate(labels)}


def _pick(columns: Sequence[str], wanted: Sequence[str], path: Path) -> str:
    for name in wanted:
        if name in columns:
            return name
    raise DataError(f"{path} has the columns {list(columns)}, expected one of {list(wanted)}")


def _decode(pillow: Any, encoded: Any, shape: tuple[int, int, int], what: str) -> np.ndarray[Any, Any]:
    channels, height, width = shape
    if not isinstance(encoded, bytes):
        raise DataError(f"{what} holds no encoded picture (got {type(encoded).__name__}); it must hold PNG or JPEG bytes")
    try:
        picture = pillow.open(io.BytesIO(encoded))
        if picture.mode != _MODES[channels]:
            picture = picture.convert(_MODES[channels])
        pixels = np.asarray(picture)
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{what} is not a picture that can be decoded: {error}") from error
    if pixels.shape[:2] != (height, width):
        raise DataError(f"{what} has {pixels.shape[1]}x{pixels.shape[0]} pixels, expected {width}x{height}")
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)
