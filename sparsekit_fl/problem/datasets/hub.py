"""Data sets of the library `datasets`: a folder here, or a repository of the hub, as `hf:NAME?image=…&label=…`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import torch
from torch import Tensor

from sparsekit.errors import DataError, UnknownNameError, nearest
from sparsekit_fl.errors import need
from sparsekit_fl.options.checked import Checked, Count, parse_value
from sparsekit_fl.problem.data import LazyData, TensorData
from sparsekit_fl.problem.datasets.base import DataSource, pixels_of

PREFIX = "hf:"
# Pictures that together are smaller are decoded once; larger ones when a batch needs them.
_EAGER_BYTES = 2**29
_SAMPLE = 500
_IMAGES, _LABELS = ("image", "img", "picture"), ("label", "labels", "fine_label", "class", "target")
_TESTS = ("test", "validation", "valid", "val")


@dataclass(frozen=True, kw_only=True)
class HubOptions(Checked):
    """What `hf:NAME?…` says beside the name.

    Args:
        image: Column of the pictures; empty: the one that is called so or holds pictures.
        label: Column of the labels; likewise.
        train: Split to learn from.
        test: Split to score with; empty: test, validation or valid, and without these a sixth of the training split.
        config: Configuration of the data set.
        size: Height and width that pictures are brought to; None: those of the first picture.
        owner: Column that says whose an example is, for the natural partition; empty: none.
    """

    image: str = ""
    label: str = ""
    train: str = "train"
    test: str = ""
    config: str = ""
    size: Count | None = None
    owner: str = ""


def load_hub(text: str, root: Path | str | None, seed: int) -> DataSource:
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
    given: dict[str, Any] = {}
    for option, value in parse_qsl(query, keep_blank_values=True):
        if option not in HubOptions.__dataclass_fields__:
            raise UnknownNameError(f"{text!r} has the option {option!r}; {nearest(option, HubOptions.__dataclass_fields__)}")
        given[option] = parse_value(Count, value, name=f"size in {text!r}") if option == "size" else value
    options = HubOptions(**given)
    return source_of(_load(name, root, options), name=name, options=options, seed=seed)


def _load(name: str, root: Path | str | None, options: HubOptions) -> Mapping[str, Any]:
    library = need("datasets", "reading the data", extra="data")
    places = [Path(name).expanduser(), *([Path(root) / name] if root is not None else [])]
    folder = next((place for place in places if place.is_dir()), None)
    saved = folder is not None and ((folder / "dataset_dict.json").exists() or (folder / "state.json").exists())
    if saved and options.config:
        raise DataError(f"{name!r} was saved to disk, which keeps one configuration; leave config={options.config} out")
    try:
        if saved:
            found = library.load_from_disk(str(folder))
        else:
            found = library.load_dataset(name if folder is None else str(folder), options.config or None)
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
    for wanted in filter(None, (options.train, options.test)):
        if wanted not in splits:
            raise DataError(f"{name!r} has no split {wanted!r}; it has {', '.join(splits)}")
    splits = {split: rows.with_format(None) for split, rows in splits.items()}
    train = splits[options.train]
    tested = options.test or next((split for split in _TESTS if split in splits and split != options.train), None)
    image = _column(train, options.image, _IMAGES, "image", name)
    label = _column(train, options.label, _LABELS, "label", name)
    if len(train) == 0:
        raise DataError(f"{name!r} has no examples")
    channels, height, width = _picture(train, image, 0).shape
    shape = (channels, options.size or height, options.size or width)
    pool, test = _pool(train, image, label, shape, name), None
    owners, owner_names = _owners(train, options.owner, name)
    labels = pool.targets
    if tested:
        test = _pool(splits[tested], image, label, shape, name)
    elif owners is None:
        order = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(99,))).permutation(len(labels))
        held = max(1, len(labels) // 6)
        pool, test = pool.take(np.sort(order[held:])), pool.take(np.sort(order[:held]))
    mean, std = _moments(pool)
    return DataSource(
        name=name,
        kind="image",
        train=pool,
        test=test,
        classes=getattr(train.features[label], "num_classes", None) or int(labels.max()) + 1,
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


def _picture(split: Any, column: str, row: int) -> Tensor:
    """Decode one picture, uint8 (C, H, W)."""
    try:
        return torch.from_numpy(np.array(pixels_of(split[row][column])))
    except (AttributeError, ValueError) as error:
        raise DataError(f"row {row} of column {column!r} is no picture of 8 bits: {error}") from error


def _owners(split: Any, owner: str, name: str) -> tuple[Tensor | None, tuple[str, ...]]:
    if not owner:
        return None, ()
    column = _column(split, owner, (), "owner", name)
    names, places = np.unique(np.asarray([str(value) for value in split[column][:]]), return_inverse=True)
    return torch.from_numpy(places.astype(np.int64)), tuple(map(str, names))


def _pool(split: Any, image: str, label: str, shape: tuple[int, int, int], name: str) -> TensorData | LazyData:
    labels = np.asarray(split[label][:] if len(split) else [])
    if labels.dtype.kind not in "iu" or labels.ndim != 1 or (len(labels) and labels.min() < 0):
        raise DataError(
            f"labels of {name!r} in column {label!r} must be integers >= 0, one each, got {labels.dtype} {labels.shape}"
        )
    lazy = LazyData(partial(_picture, split, image), torch.from_numpy(labels.astype(np.int64)), shape)
    return lazy if len(labels) * int(np.prod(shape)) > _EAGER_BYTES else TensorData(*lazy.batch())


def _moments(pool: TensorData | LazyData) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation per channel of pixels in [0, 1], of some pictures."""
    places = np.linspace(0, len(pool) - 1, min(len(pool), _SAMPLE)).astype(np.int64)
    pixels = pool.batch(torch.from_numpy(places))[0][0].to(torch.float64) / 255
    mean, std = pixels.mean(dim=(0, 2, 3)), pixels.std(dim=(0, 2, 3)).clamp(min=1e-3)
    return tuple(round(float(value), 4) for value in mean), tuple(round(float(value), 4) for value in std)
