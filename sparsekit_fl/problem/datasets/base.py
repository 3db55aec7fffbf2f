"""DataSource: a data set before it is dealt to clients; and how pictures and raw rows become what a model takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsekit.errors import DataError
from sparsekit_fl.problem.data import TensorData, Transform


@dataclass(frozen=True, kw_only=True, eq=False)
class DataSource:
    """Raw examples and what is known about them.

    Args:
        name: As the registry has it.
        kind: "image": inputs uint8 `(rows, C, H, W)`, targets int64 `(rows,)`. "tokens": inputs integer `(rows, T)`,
            targets int64 `(rows, T)`, the next tokens, `metrics.IGNORED` where there is none.
        train: The examples to learn from.
        test: The examples to score with; None if every natural client splits its own.
        classes: Labels are in [0, classes); for tokens the size of the vocabulary.
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
    kind: Literal["image", "tokens"]
    train: TensorData
    test: TensorData | None
    classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    owners: Tensor | None = None
    owner_names: tuple[str, ...] = ()
    never_right: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("image", "tokens"):
            raise DataError(f"kind of data source {self.name!r} must be 'image' or 'tokens', got {self.kind!r}")
        dimensions = 4 if self.kind == "image" else 2
        for what, pool in (("train", self.train), ("test", self.test)):
            if pool is None:
                continue
            inputs = pool.inputs[0]
            fits = inputs.dtype == torch.uint8 if self.kind == "image" else not inputs.is_floating_point()
            if inputs.ndim != dimensions or not fits:
                wanted = "uint8 (rows, C, H, W)" if self.kind == "image" else "integers (rows, T)"
                raise DataError(
                    f"{what} inputs of {self.kind} source {self.name!r} must be {wanted},"
                    f" got {inputs.dtype} {tuple(inputs.shape)}; for anything else return (problem, clients) from your factory"
                )
            labels = pool.labels()
            if len(labels) and int(labels.max()) >= self.classes:
                raise DataError(f"{what} of {self.name!r} has label {int(labels.max())}, but classes is {self.classes}")
            if len(labels) and self.kind == "image" and int(labels.min()) < 0:
                raise DataError(f"{what} of {self.name!r} has label {int(labels.min())}; leave out examples without a class")
        if self.kind == "image" and not len(self.mean) == len(self.std) == self.shape[0]:
            raise DataError(
                f"mean and std of {self.name!r} need one number per channel ({self.shape[0]}), got {self.mean} and {self.std}"
            )
        if self.owners is not None and len(self.owners) != len(self.train):
            raise DataError(f"owners of {self.name!r} must name {len(self.train)} examples, got {len(self.owners)}")
        if self.owners is None and self.test is None:
            raise DataError(f"{self.name!r} has neither test examples nor owners; give test=, or owners= that split their own")

    @property
    def shape(self) -> torch.Size:
        """Of one raw input: `(C, H, W)` or `(T,)`."""
        return self.train.inputs[0].shape[1:]

    def with_transform(self, transform: Transform | None) -> DataSource:
        """The same source, read through another transform."""
        return replace(
            self,
            train=replace(self.train, transform=transform),
            test=None if self.test is None else replace(self.test, transform=transform),
        )


_MODES: Mapping[int | None, str] = {1: "L", 3: "RGB"}


def pixels_of(picture: Any, channels: int | None = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the pixels of a picture of Pillow.

    Args:
        picture: As Pillow opens it.
        channels: How many come out, 1 or 3; anything else keeps grey pictures grey, and makes three of others.

    Returns:
        uint8 (C, H, W).

    Raises:
        ValueError: it has more than 8 bits a channel, which Pillow would cut off at white.
    """
    if picture.mode.startswith(("I", "F")):
        raise ValueError(f"it has more than 8 bits a channel (mode {picture.mode}); scale it to 8 bits first")
    mode = _MODES.get(channels, "L" if picture.mode == "L" else "RGB")
    found = np.asarray(picture if picture.mode == mode else picture.convert(mode))
    return found[None] if found.ndim == 2 else found.transpose(2, 0, 1)


@dataclass(frozen=True)
class ImageTransform:
    """uint8 images to normalised float images of a given size.

    A picture that is nearly as large as asked for (three quarters or more) is padded with black, so that its pixels stay
    what they are; any other is resized bilinearly. One grey channel is repeated where three are asked for.

    Args:
        channels: Number of channels that come out: those of the raw picture, unless that is grey.
        size: Height and width that come out.
        mean: Per channel of the raw picture, in [0, 1].
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


@dataclass(frozen=True)
class TokenTransform:
    """Token ids, stored small, to the int64 that embeddings take."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """`(batch, T)` integers → int64 `(batch, T)`."""
        return tokens.long()
