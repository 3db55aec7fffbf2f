"""FixedTurn: the buffers of a step, which stay where they are while its lanes and batches change."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from sparsekit_fl.lanes.rows import Rows
from sparsekit_fl.training.loop import Batch

__all__ = ["FixedTurn"]

_MASKS = 64  # sets of lanes whose masks are kept on the device


class FixedTurn:
    """What steps of one kind read: batches, and who takes part.

    A step of at least half the lanes is computed for all of them, and what it gives for the others is thrown away: so lanes
    whose batches have run out, or are of another size, change a mask and no shape. A step of fewer is computed for these alone.

    Args:
        lanes: Who takes the first step of this kind, ascending.
        batch: One of its batches.
        count: Number of all lanes.
        device: Where the buffers are.
    """

    def __init__(self, lanes: Sequence[int], batch: Batch, count: int, device: torch.device) -> None:
        self._device = device
        self._all = range(count) if 2 * len(lanes) >= count else tuple(lanes)
        rows = len(self._all)
        self.inputs = tuple(torch.empty(rows, *item.shape, dtype=item.dtype, device=device) for item in batch.inputs)
        self.targets = torch.empty(rows, *batch.targets.shape, dtype=batch.targets.dtype, device=device)
        self._active = None if len(lanes) == rows else torch.zeros(rows, dtype=torch.bool, device=device)
        self._masks: dict[tuple[int, ...], Tensor] = {}
        first = self._all[0]
        beside = self._all[-1] - first + 1 == rows
        self.rows = Rows(slice(first, first + rows) if beside else torch.tensor(self._all, device=device), self._active)

    @staticmethod
    def kind(lanes: Sequence[int], batch: Batch, count: int) -> Hashable:
        """What is equal for steps that can share buffers, and ask the same of the device."""
        shapes = tuple((item.shape, item.dtype) for item in (*batch.inputs, batch.targets))
        if 2 * len(lanes) >= count:
            return len(lanes) == count, shapes
        return tuple(lanes), shapes

    def fill(self, lanes: Sequence[int], batches: Sequence[Batch]) -> None:
        """Write the batches of the lanes that take the step; those that do not get the batch of another one."""
        own = dict(zip(lanes, batches, strict=True))
        chosen = [own.get(lane, batches[0]) for lane in self._all]
        for place, buffer in enumerate(self.inputs):
            torch.stack([batch.inputs[place] for batch in chosen], out=buffer)
        torch.stack([batch.targets for batch in chosen], out=self.targets)
        if self._active is not None:
            self._active.copy_(self._mask(tuple(lanes)))

    def _mask(self, lanes: tuple[int, ...]) -> Tensor:
        """The mask of a set of lanes, copied to the device once."""
        if lanes not in self._masks:
            if len(self._masks) >= _MASKS:
                self._masks.clear()
            self._masks[lanes] = torch.tensor([lane in lanes for lane in self._all], device=self._device)
        return self._masks[lanes]

    def places(self, lanes: Sequence[int]) -> list[int]:
        """The rows of the lanes that take the step."""
        return [self._all.index(lane) for lane in lanes]
