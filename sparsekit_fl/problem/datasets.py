"""Registry of data sets, and search for their files. A `DataSource` is a data set before it is divided among clients."""

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsekit.errors import DataError, install_hint
from sparsekit.registry import Registry
from sparsekit_fl.problem.data import TensorData, read
from sparsekit_fl.problem.models import Kind

_log = logging.getLogger(__name__)

_IMAGES = ("digits", "mnist", "cifar10", "cifar100", "tiny-imagenet")
_OURS = {name: f"sparsekit_fl.problem.images:{name.replace('-', '_')}" for name in _IMAGES}
datasets = Registry("dataset", _OURS, group="sparsekit_fl.datasets")


@dataclass(frozen=True)
class ImageTransform:
    """Resizes and normalizes uint8 images. `mean` and `std` are per channel of the raw image, for pixels scaled to [0, 1].

    An image that is no larger than `size`, but at least three quarters of it on each side, is padded with black, so that its
    pixels stay unchanged. Other images are resized bilinearly. A single grey channel is repeated if there are more `channels`.
    """

    channels: int
    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        """Map uint8 images `(batch, C, H, W)` to float images `(batch, channels, *size)`."""
        pixels = images.to(torch.get_default_dtype()).div_(255)
        height, width = pixels.shape[-2:]
        if (height, width) != self.size:
            missing = (self.size[0] - height, self.size[1] - width)
            if min(missing) >= 0 and height * 4 >= self.size[0] * 3 and width * 4 >= self.size[1] * 3:
                top, left = missing[0] // 2, missing[1] // 2
                pixels = F.pad(pixels, (left, missing[1] - left, top, missing[0] - top))
            else:
                smaller = height > self.size[0] or width > self.size[1]
                pixels = F.interpolate(pixels, size=self.size, mode="bilinear", align_corners=False, antialias=smaller)
        mean, std = (
            torch.tensor(value, dtype=pixels.dtype, device=pixels.device).view(-1, 1, 1) for value in (self.mean, self.std)
        )
        pixels = pixels.sub_(mean).div_(std)
        return pixels if pixels.shape[1] == self.channels else pixels.repeat(1, self.channels, 1, 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class DataSource:
    """Examples and their properties, before they are divided among clients.

    Args:
        name: Used in errors and results.
        train: Training examples.
        test: Test examples; None if each owner's training examples are split instead.
        kind: "image": one input, uint8 `(rows, C, H, W)`, which is resized and normalized for the model. "tokens": one input,
            integer `(rows, T)`; targets int64 `(rows, T)`, the next tokens, `metrics.IGNORED` where there is none. "other":
            anything else, such as the features of a table; the model gets the inputs as they are.
        classes: Labels are in [0, classes); for tokens the size of the vocabulary; 0 if targets are not labels.
        mean: Mean of each channel, for pixels scaled to [0, 1]; images only.
        std: Standard deviation of each channel, likewise.
        owners: int64 `(len(train),)`: the natural client of each training example, counted from 0; the rows of one owner are in
            order of time. None if the data set has no natural clients.
        never_right: Token ids that accuracy never counts as correct, such as the one for unknown words.

    Raises:
        DataError: the parts do not fit together.
    """

    name: str
    train: TensorData
    test: TensorData | None = None
    kind: Kind = "other"
    classes: int = 0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    owners: Tensor | None = None
    never_right: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("image", "tokens", "other"):
            raise DataError(f"kind of data source {self.name!r} must be 'image', 'tokens' or 'other', got {self.kind!r}")
        for what, pool in (("train", self.train), ("test", self.test)):
            if not isinstance(pool, TensorData | NoneType):
                raise DataError(f"{what} of {self.name!r} must be TensorData, got {type(pool).__name__}")
            if pool is not None and not len(pool):
                raise DataError(f"{what} of {self.name!r} has no examples; give at least one, or leave test= out")
            inputs = None if pool is None else pool.inputs[0]
            if self.kind == "image" and inputs is not None and (inputs.dtype != torch.uint8 or inputs.ndim != 4):
                raise DataError(
                    f"{what} images of {self.name!r} must be uint8 (rows, C, H, W), got {inputs.dtype} {tuple(inputs.shape)};"
                    " for anything else pass kind='other'"
                )
            labels = None if pool is None or self.kind == "tokens" or not self.classes else pool.labels()
            if labels is not None and len(labels) and (labels.min() < 0 or labels.max() >= self.classes):
                wrong = int(labels.min() if labels.min() < 0 else labels.max())
                raise DataError(f"{what} of {self.name!r} has label {wrong}, which is not in [0, {self.classes})")
        if self.kind == "image" and not len(self.mean) == len(self.std) == self.shape[0]:
            raise DataError(
                f"mean and std of {self.name!r} need one number per channel ({self.shape[0]}), got {self.mean} and {self.std}"
            )
        if self.owners is None and self.test is None:
            raise DataError(f"{self.name!r} has neither test examples nor owners; give test=, or owners= that split their own")

    @property
    def shape(self) -> torch.Size:
        """Shape of one raw example of the first input: `(C, H, W)` or `(T,)`."""
        return self.train.inputs[0].shape[1:]

    @classmethod
    def of(cls, name: str, found: Any, seed: int) -> Self:
        """Return a source of examples in another form, which are read into memory.

        Args:
            name: Name of the source.
            found: Batches `(input, …, target)`, a map-style data set of such examples, or a pair of these, the second for
                tests. Without it, a random fifth of the examples is.
            seed: Seed of that fifth.

        Raises:
            DataError: the examples are in no such form, or fewer than five.
        """
        pair = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        train, test = (_examples(name, one) for one in pair)
        if train is None or (test is None and len(train) < 5):
            raise DataError(f"{name!r} has too few examples to set a fifth aside; return a pair of data for training and tests")
        if test is None:
            order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
            kept = len(order) - len(order) // 5
            train, test = train.take(order[:kept]), train.take(order[kept:])
        labels = torch.cat([train.labels(), test.labels()])
        classes = int(labels.max()) + 1 if labels.ndim == 1 and not labels.is_floating_point() else 0
        return cls(name=name, train=train, test=test, classes=classes)

    def pruning_data(self) -> tuple[TensorData, None]:
        """Return what `sparsekit prune` trains on; images are normalized. Test examples are not for pruning."""
        return (self if self.kind != "image" or self.train.transform is not None else self.normalized(self.shape)).train, None

    def normalized(self, shape: tuple[int, ...]) -> Self:
        """Return a copy whose images are resized to `shape` (C, H, W) and normalized."""
        channels, height, width = shape
        transform = ImageTransform(channels, (height, width), self.mean, self.std)
        test = None if self.test is None else replace(self.test, transform=transform)
        return replace(self, train=replace(self.train, transform=transform), test=test)


def _examples(name: str, data: Any) -> TensorData | None:
    if data is None or isinstance(data, TensorData):
        return data
    try:
        if hasattr(data, "__iter__"):
            *inputs, targets = (torch.cat(column) for column in zip(*data, strict=True))
            return TensorData(tuple(inputs), targets)
        return TensorData(*read(data, list(range(len(data)))))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{name!r} must return a DataSource, (Problem, DataSource), (Problem, list of Client), batches (input, …, target)"
            f" of tensors, a map-style data set, or a pair of these for training and tests, got {type(data).__name__}: {error}"
        ) from error


def find_files(
    name: str, root: Path | str | None, *patterns: str, layout: str, repo: str, aliases: Sequence[str] = ()
) -> list[list[Path]]:
    """Return the files of a data set for each pattern, sorted: from the user's data directory, or from the hub without `root`.

    `layout` describes the expected files in errors, `repo` is the id of the data set on the Hugging Face hub, and `aliases` are
    other names of its folder. If files are missing, a DataError says how to provide them.
    """
    ways = (
        f"either pass --data-dir DIR with DIR/{layout} (the files of the hub data set {repo}), or, on a machine with a network,"
        f" leave --data-dir out and install the hub's client: {install_hint('huggingface_hub')}"
    )
    if root is not None:
        root, names = Path(root).expanduser(), (name, *aliases)
        folders = [*(root / spelling for spelling in names), *([root] if root.name in names else [])]
        folder = next(filter(Path.is_dir, folders), folders[0])
    else:
        _log.info("fetching the hub data set %s (kept in the hub's cache)", repo)
        wanted = [folder + pattern for pattern in patterns for folder in ("", "*/")]
        try:
            hub = importlib.import_module("huggingface_hub")
            folder = Path(hub.snapshot_download(repo, repo_type="dataset", allow_patterns=wanted))
        except Exception as error:
            # The hub's client raises exceptions of many types; all mean that the data set cannot be downloaded.
            raise DataError(f"cannot fetch the hub data set {repo}: {error}; {ways}") from error
    found = [sorted(folder.rglob(pattern)) for pattern in patterns]
    if not all(found):
        there = sorted(path.name for path in folder.rglob("*") if path.is_file())[:20]
        raise DataError(f"{str(folder)!r} does not hold the data set {name!r}: found {there or 'no file'}; {ways}")
    return found
