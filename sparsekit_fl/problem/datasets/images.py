"""Image data sets in the parquet layout of the hub: one `ImageSet` a data set."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsekit.errors import DataError
from sparsekit_fl.errors import need
from sparsekit_fl.problem.data import TensorData
from sparsekit_fl.problem.datasets.base import DataSource, pixels_of
from sparsekit_fl.problem.datasets.files import Arrays, cached_arrays, find_split_files

_IMAGE_COLUMNS = ("image", "img")
_LABEL_COLUMNS = ("label", "fine_label")


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """An image data set in parquet files, read from `<root>/<name>/**/*.parquet` or fetched once from the hub.

    Args:
        about: One sentence, for lists.
        repo: Its id on the hub.
        shape: `(C, H, W)` of every picture; other modes are converted, other sizes are an error.
        mean: Per channel, of pixels scaled to [0, 1].
        std: Likewise.
        aliases: Other spellings of the folder.
        test_names: How names of test files begin, in order of preference.
    """

    name: str
    about: str
    repo: str
    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    aliases: tuple[str, ...] = ()
    test_names: tuple[str, ...] = ("test",)

    def __post_init__(self) -> None:
        # Lists of names show the documentation of what they name.
        object.__setattr__(self, "__doc__", self.about)

    def __call__(self, root: Path | str | None = None) -> DataSource:
        """Load the data set.

        Args:
            root: The user's data directory; None to fetch the hub's copy.

        Returns:
            The source; pictures stay uint8, in one array that all clients share.

        Raises:
            DataError: files are missing or malformed; the message says how to get them.
            MissingDependencyError: pyarrow or Pillow is not installed.
        """
        splits = find_split_files(self.name, root, repo=self.repo, aliases=self.aliases, test_names=self.test_names)
        train, test = (self._pool(split, files) for split, files in zip(("train", "test"), splits, strict=True))
        return DataSource(
            name=self.name, kind="image", train=train, test=test, classes=self.classes, mean=self.mean, std=self.std
        )

    def _pool(self, split: str, files: Sequence[Path]) -> TensorData:
        arrays = cached_arrays(f"{self.name}-{split}", files, lambda: read_images(files, self.shape))
        return TensorData((torch.from_numpy(arrays["images"]),), torch.from_numpy(arrays["labels"]))


mnist = ImageSet(
    name="mnist",
    about="60,000 + 10,000 handwritten digits.",
    repo="ylecun/mnist",
    shape=(1, 28, 28),
    classes=10,
    mean=(0.1307,),
    std=(0.3081,),
)

cifar10 = ImageSet(
    name="cifar10",
    about="50,000 + 10,000 small photographs of ten kinds.",
    repo="uoft-cs/cifar10",
    shape=(3, 32, 32),
    classes=10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
)

cifar100 = ImageSet(
    name="cifar100",
    about="50,000 + 10,000 small photographs of a hundred kinds, with the fine labels.",
    repo="uoft-cs/cifar100",
    shape=(3, 32, 32),
    classes=100,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)

tiny_imagenet = ImageSet(
    name="tiny-imagenet",
    about="Photographs of 200 kinds; the validation split is the test set.",
    repo="zh-plus/tiny-imagenet",
    shape=(3, 64, 64),
    classes=200,
    mean=(0.4802, 0.4481, 0.3975),
    std=(0.2770, 0.2691, 0.2821),
    aliases=("tiny_imagenet",),
    test_names=("valid", "val", "test"),  # the true test labels were never published
)


def read_images(files: Sequence[Path], shape: tuple[int, int, int]) -> Arrays:
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
    parquet, pillow = need("pyarrow.parquet", "reading the data", extra="fl"), need("PIL.Image", "reading the data", extra="fl")
    images, labels = [], []
    for path in files:
        try:
            table = parquet.read_table(path)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is not a readable parquet file: {error}; fetch it again") from error
        encoded = table[_pick(table.column_names, _IMAGE_COLUMNS, path)]
        decoded = np.empty((len(encoded), *shape), dtype=np.uint8)
        for row, cell in enumerate(encoded.to_pylist()):
            decoded[row] = _decode(pillow, cell["bytes"] if isinstance(cell, dict) else cell, shape, f"row {row} of {path}")
        images.append(decoded)
        labels.append(np.asarray(table[_pick(table.column_names, _LABEL_COLUMNS, path)].to_pylist(), dtype=np.int64))
    return {"images": images[0] if len(images) == 1 else np.concatenate(images), "labels": np.concatenate(labels)}


def _pick(columns: Sequence[str], wanted: Sequence[str], path: Path) -> str:
    for name in wanted:
        if name in columns:
            return name
    raise DataError(f"{path} has the columns {list(columns)}, expected one of {list(wanted)}")


def _decode(pillow: Any, encoded: Any, shape: tuple[int, int, int], what: str) -> np.ndarray[Any, Any]:
    if not isinstance(encoded, bytes):
        raise DataError(f"{what} holds no encoded picture (got {type(encoded).__name__}); it must hold PNG or JPEG bytes")
    try:
        pixels = pixels_of(pillow.open(io.BytesIO(encoded)), shape[0])
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{what} is not a picture that can be decoded: {error}") from error
    if pixels.shape != shape:
        raise DataError(f"{what} has {pixels.shape[2]}x{pixels.shape[1]} pixels, expected {shape[2]}x{shape[1]}")
    return pixels
