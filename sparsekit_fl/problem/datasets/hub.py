"""Data sets of the library `datasets`: a folder here, or a repository of the hub, as `hf:NAME?image=…&label=…`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import torch
from torch import Tensor

from sparsekit.errors import DataError, InvalidValueError, UnknownNameError, nearest
from sparsekit_fl.problem.data import TensorData
from sparsekit_fl.problem.datasets.base import DataSource
from sparsekit_fl.problem.datasets.files import require
from sparsekit_fl.problem.lazy import LazyData, fitted

PREFIX = "hf:"
# Pictures that together are smaller are decoded once; larger ones when a batch needs them.
_EAGER_BYTES = 2**29
_SAMPLE = 500
_IMAGES, _LABELS = ("image", "img", "picture"), ("label", "labels", "fine_label", "class", "target")
_TESTS = ("test", "validation", "valid", "val")


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    """What `hf:NAME?…` says beside the name.

    Args:
        image: Column of the pictures; empty: the one that is called so or holds pictures.
        label: Column of the labels; likewise.
        train: Split to learn from.
        test: Split to score with; empty: test, validation or valid, and without these a sixth of the training split.
        config: Configuration of the data set.
        size: Height and width that pictures are brought to; 0: those of the first picture.
        owner: Column that says whose an example is, for the natural partition; empty: none.
    """

    image: str = ""
    label: str = ""
    train: str = "train"
    test: str = ""
    config: str = ""
    size: int = 0
    owner: str = ""


def load_hub(text: str, root: Path | None, seed: int) -> DataSource:
    """Load `hf:NAME?option=value&…`.

    Args:
        text: NAME is a folder (of `save_to_disk`, of pictures in a folder per class, or of parquet files), looked for under
            `root` too, or a repository of the hub.
        root: The user's data directory.
        seed: Draws the test examples, where the data set has no test split.

    Raises:
        DataError: it cannot be loaded, or has no pictures and labels.
        MissingDependencyError: `datasets` is not installed.
        UnknownNameError, InvalidValueError: a wrong option.
    """
    name, _, query = text.removeprefix(PREFIX).partition("?")
    known = HubOptions.__dataclass_fields__
    given: dict[str, Any] = {}
    for option, value in parse_qsl(query, keep_blank_values=True):
        if option not in known:
            raise UnknownNameError(f"{text!r} has the option {option!r}; {nearest(option, known)}")
        given[option] = value
    if "size" in given:
        if not str(given["size"]).isdigit() or int(given["size"]) < 1:
            raise InvalidValueError(f"size in {text!r} must be an integer >= 1, got {given['size']!r}")
        given["size"] = int(given["size"])
    options = HubOptions(**given)
    return source_of(_load(name, root, options), name=name, options=options, seed=seed)


def _load(name: str, root: Path | None, options: HubOptions) -> Mapping[str, Any]:
    library = require("datasets", extra="data")
    places = [Path(name).expanduser(), *([root / name] if root is not None else [])]
    folder = next((place for place in places if place.is_dir()), None)
    try:
        if folder is not None and ((folder / "dataset_dict.json").exists() or (folder / "state.json").exists()):
            found = library.load_from_disk(str(folder))
        elif folder is not None:
            found = library.load_dataset(str(folder))
        else:
            found = library.load_dataset(name, options.config or None)
    except Exception as error:
        where = "" if folder is not None else f", which is no folder here ({', '.join(map(str, places))}), from the hub"
        raise DataError(f"cannot load the data set {name!r}{where}: {type(error).__name__}: {error}") from error
    return found if isinstance(found, Mapping) else {options.train: found}


def source_of(
    splits: Mapping[str, Any], *, name: str = "data set", options: HubOptions | None = None, seed: int = 0
) -> DataSource:
    """A data set of `datasets` as a source of pictures with labels.

    Args:
        splits: Name → `datasets.Dataset`, as in a `DatasetDict`.
        name: For messages.
        options: Columns, splits and size.
        seed: Draws the test examples, where there is no test split.

    Raises:
        DataError: a split or a column is missing, or labels are no integers.
    """
    options = options or HubOptions()
    if options.train not in splits:
        raise DataError(f"{name!r} has no split {options.train!r}; it has {', '.join(splits)}")
    if options.test and options.test not in splits:
        raise DataError(f"{name!r} has no split {options.test!r}; it has {', '.join(splits)}")
    train = splits[options.train]
    tested = options.test or next((split for split in _TESTS if split in splits and split != options.train), "")
    image = _column(train, options.image, _IMAGES, "image", name)
    label = _column(train, options.label, _LABELS, "label", name)
    shape = _shape(train, image, options.size, name)
    rows, test_rows = _Rows(train, image), _Rows(splits[tested], image) if tested else None
    labels = _labels(train, label, name)
    owners, owner_names = _owners(train, options.owner, name)
    pools = {"train": _pool(rows, labels, shape)}
    if test_rows is not None:
        pools["test"] = _pool(test_rows, _labels(splits[tested], label, name), shape)
    elif owners is None:
        order = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(99,))).permutation(len(labels))
        held = max(1, len(labels) // 6)
        pools = {"train": pools["train"].take(np.sort(order[held:])), "test": pools["train"].take(np.sort(order[:held]))}
    classes = getattr(train.features[label], "num_classes", None) or int(labels.max()) + 1
    mean, std = _moments(pools["train"])
    return DataSource(
        name=name,
        kind="image",
        train=pools["train"],
        test=pools.get("test"),
        classes=classes,
        mean=mean,
        std=std,
        owners=owners,
        owner_names=owner_names,
    )


def _column(split: Any, given: str, usual: tuple[str, ...], what: str, name: str) -> str:
    columns = list(split.column_names)
    if given:
        if given not in columns:
            raise DataError(f"{name!r} has no column {given!r}; {nearest(given, columns)}")
        return given
    found = next((column for column in usual if column in columns), None)
    if found is None and what == "image":
        found = next((column for column, kind in split.features.items() if type(kind).__name__ == "Image"), None)
    if found is None:
        raise DataError(f"{name!r} has the columns {', '.join(columns)}, none of which is called {what}; pass ?{what}=COLUMN")
    return found


class _Rows:
    """Row → picture, decoded when it is asked for."""

    def __init__(self, split: Any, column: str) -> None:
        self.split, self.column = split, column

    def __call__(self, row: int) -> Tensor:
        """uint8 (C, H, W)."""
        value = self.split[row][self.column]
        pixels = np.asarray(value.convert("RGB") if getattr(value, "mode", "L") not in ("L", "RGB") else value)
        if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
            raise DataError(f"row {row} of column {self.column!r} is no picture of 8 bits, got {pixels.dtype} {pixels.shape}")
        tensor = torch.from_numpy(np.array(pixels))
        return tensor[None] if tensor.ndim == 2 else tensor.permute(2, 0, 1) if tensor.shape[-1] in (1, 3) else tensor


def _shape(split: Any, image: str, size: int, name: str) -> tuple[int, int, int]:
    if len(split) == 0:
        raise DataError(f"{name!r} has no examples")
    channels, height, width = _Rows(split, image)(0).shape
    return (channels, size or height, size or width)


def _labels(split: Any, label: str, name: str) -> Tensor:
    found = np.asarray(split.with_format(None)[label][:] if len(split) else [])
    if found.dtype.kind not in "iu" or found.ndim != 1 or (len(found) and found.min() < 0):
        raise DataError(
            f"labels of {name!r} in column {label!r} must be integers >= 0, one each, got {found.dtype} {found.shape}"
        )
    return torch.from_numpy(found.astype(np.int64))


def _owners(split: Any, owner: str, name: str) -> tuple[Tensor | None, tuple[str, ...]]:
    if not owner:
        return None, ()
    if owner not in split.column_names:
        raise DataError(f"{name!r} has no column {owner!r}; {nearest(owner, split.column_names)}")
    names, places = np.unique(np.asarray([str(value) for value in split[owner][:]]), return_inverse=True)
    return torch.from_numpy(places.astype(np.int64)), tuple(map(str, names))


def _pool(rows: _Rows, labels: Tensor, shape: tuple[int, int, int]) -> TensorData | LazyData:
    if len(labels) * int(np.prod(shape)) > _EAGER_BYTES:
        return LazyData(read=rows, targets=labels, shape=shape)
    pictures = torch.empty(len(labels), *shape, dtype=torch.uint8)
    for row in range(len(labels)):
        pictures[row] = fitted(rows(row), shape)
    return TensorData((pictures,), labels)


def _moments(pool: TensorData | LazyData) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation per channel of pixels in [0, 1], of some pictures."""
    places = np.linspace(0, len(pool) - 1, min(len(pool), _SAMPLE)).astype(np.int64)
    pixels = pool.batch(torch.from_numpy(places))[0][0].to(torch.float64) / 255
    mean, std = pixels.mean(dim=(0, 2, 3)), pixels.std(dim=(0, 2, 3)).clamp(min=1e-3)
    return tuple(round(float(value), 4) for value in mean), tuple(round(float(value), 4) for value in std)
