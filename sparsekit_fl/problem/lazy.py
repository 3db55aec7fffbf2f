"""LazyData: examples that are decoded when a batch needs them, for pictures of any size and for data larger than memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsekit_fl.problem.data import Batch, Positions, Transform, View


def fitted(picture: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Bring a picture of any size to one shape.

    Args:
        picture: uint8 (C, H, W), C 1 or 3.
        shape: (C, H, W) that come out. The shorter side is scaled to its length, and the middle of the longer one is cut out;
            grey is repeated, and colours are averaged to grey.
    """
    channels, height, width = shape
    if picture.shape[0] != channels:
        grey = picture.to(torch.float32).mean(0, keepdim=True).round().to(torch.uint8)
        picture = grey.expand(channels, -1, -1)
    if tuple(picture.shape[1:]) == (height, width):
        return picture
    scale = max(height / picture.shape[1], width / picture.shape[2])
    size = (max(height, round(picture.shape[1] * scale)), max(width, round(picture.shape[2] * scale)))
    scaled = F.interpolate(
        picture[None].to(torch.float32), size=size, mode="bilinear", align_corners=False, antialias=scale < 1
    )[0]
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return scaled[:, top : top + height, left : left + width].round().clamp(0, 255).to(torch.uint8)


@dataclass(frozen=True, eq=False)
class LazyData(View):
    """Pictures that are read one by one; used in place of `TensorData`.

    Args:
        read: Row → picture, uint8 (C, H, W) of any size; called for every example of every batch.
        targets: int64 (rows,).
        shape: (C, H, W) of what comes out; see `fitted`.
        index: int64 (examples,), which rows belong to this view; None means every row.
        transform: Applied to each batch when it is read.

    Raises:
        DataError: the index points outside the rows.
    """

    read: Callable[[int], Tensor]
    targets: Tensor
    shape: tuple[int, int, int]
    index: Tensor | None = None
    transform: Transform | None = None

    def __post_init__(self) -> None:
        self._check_index()

    def batch(self, positions: Positions = None) -> Batch:
        every = torch.arange(len(self.targets))
        chosen = self._rows(positions)
        rows = every[chosen] if isinstance(chosen, slice) else chosen
        pictures = [fitted(self.read(int(row)), self.shape) for row in rows]
        inputs = torch.stack(pictures) if pictures else torch.empty(0, *self.shape, dtype=torch.uint8)
        return (inputs if self.transform is None else self.transform(inputs),), self.targets.index_select(0, rows)
