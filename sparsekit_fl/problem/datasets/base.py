"""DataSource: a data set before it is divided among clients; ImageTransform: how raw images become what a model takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsekit.errors import DataError
from sparsekit_fl.problem.data import Kind, TensorData, Transform


@dataclass(frozen=True, kw_only=True, eq=False)
class DataSource:
    """Examples, and what is known about them, before they are divided among clients.

    Args:
        name: Used in messages and results.
        train: The examples to learn from.
        test: The examples to score with; None if every owner splits its own.
        kind: "image": one input, uint8 `(rows, C, H, W)`, which is resized and normalised for the model. "tokens": one input,
            integer `(rows, T)`; targets int64 `(rows, T)`, the next tokens, `metrics.IGNORED` where there is none. "other":
            anything else, such as the features of a table; the model gets the inputs as they are.
        classes: Labels are in [0, classes); for tokens the size of the vocabulary; 0 if targets are not labels.
        mean: Per channel, of pixels scaled to [0, 1]; images only.
        std: Per channel, likewise.
        owners: int64 `(len(train),)`: the natural client of each training example, in [0, len(owner_names)); the rows of
            one owner are in order of time. None if the data set has no natural clients.
        owner_names: A name for each natural client.
        never_right: Token ids that count as asked for but never as right, such as the one for unknown words.

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
    owner_names: tuple[str, ...] = ()
    never_right: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("image", "tokens", "other"):
            raise DataError(f"kind of data source {self.name!r} must be 'image', 'tokens' or 'other', got {self.kind!r}")
        for what, pool in (("train", self.train), ("test", self.test)):
            if pool is not None:
                self._check(what, pool)
        if self.kind == "image" and not len(self.mean) == len(self.std) == self.shape[0]:
            raise DataError(
                f"mean and std of {self.name!r} need one number per channel ({self.shape[0]}), got {self.mean} and {self.std}"
            )
        if self.owners is not None and len(self.owners) != len(self.train):
            raise DataError(f"owners of {self.name!r} must name {len(self.train)} examples, got {len(self.owners)}")
        if self.owners is None and self.test is None:
            raise DataError(f"{self.name!r} has neither test examples nor owners; give test=, or owners= that split their own")

    def _check(self, what: str, pool: TensorData) -> None:
        if not isinstance(pool, TensorData):
            raise DataError(f"{what} of {self.name!r} must be TensorData, got {type(pool).__name__}; see as_tensor_data")
        inputs, labels = pool.inputs[0], pool.labels()
        wanted = {"image": "uint8 (rows, C, H, W)", "tokens": "integers (rows, T)"}.get(self.kind)
        fits = inputs.dtype == torch.uint8 if self.kind == "image" else not inputs.is_floating_point()
        if wanted and not (fits and inputs.ndim == wanted.count(",") + 1 and len(pool.inputs) == 1):
            raise DataError(
                f"{what} inputs of {self.kind} source {self.name!r} must be {wanted}, got {inputs.dtype}"
                f" {tuple(inputs.shape)}; for anything else pass kind='other'"
            )
        if not len(labels) or (self.kind == "other" and not self.classes):
            return
        if int(labels.max()) >= self.classes:
            raise DataError(f"{what} of {self.name!r} has label {int(labels.max())}, but classes is {self.classes}")
        if self.kind != "tokens" and int(labels.min()) < 0:
            raise DataError(f"{what} of {self.name!r} has label {int(labels.min())}; leave out examples without a class")

    @property
    def shape(self) -> torch.Size:
        """Of one raw example of the first input: `(C, H, W)` or `(T,)`."""
        return self.train.inputs[0].shape[1:]

    def with_transform(self, transform: Transform | None) -> DataSource:
        """Return the same source, read through another transform."""
        test = None if self.test is None else replace(self.test, transform=transform)
        return replace(self, train=replace(self.train, transform=transform), test=test)


@dataclass(frozen=True)
class ImageTransform:
    """Make normalised float images of a given size from uint8 images.

    An image that is nearly as large as asked for (three quarters or more) is padded with black, so that its pixels stay
    as they are; any other is resized bilinearly. One grey channel is repeated where three are asked for.

    Args:
        channels: Number of channels of the result: those of the raw image, unless that is grey.
        size: Height and width of the result.
        mean: Per channel of the raw image, in [0, 1].
        std: Likewise.
    """

    channels: int
    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        """`(batch, C, H, W)` uint8 → float `(batch, channels, *size)`."""
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
