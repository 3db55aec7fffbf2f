"""From raw rows to what a model takes: scaling, normalising, padding, resizing, grey to colour. Torch operations only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


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
                pixels = F.interpolate(
                    pixels, size=self.size, mode="bilinear", align_corners=False, antialias=height > self.size[0]
                )
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
