"""Undo: earlier values of changed tensors, kept in a temporary file, since memory may hold one model only."""

import tempfile
from collections.abc import Iterable

import torch
from torch import Tensor

from sparsekit.surgery.rebuild import reshape_leaf

_IN_MEMORY = 2**26
"""Bytes that are kept in memory; more go to a file."""


class Undo:
    """Values of entries of a model, to put back. `close` deletes them."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 - it is closed by `close`
        self._kept: list[tuple[Tensor, torch.Size, torch.device, int]] = []

    def keep(self, entries: Iterable[Tensor]) -> None:
        """Save the present values of some entries; if an entry is saved twice, its first values are restored."""
        for entry in entries:
            self._kept.append((entry, entry.shape, entry.device, self._file.tell()))
            self._file.write(bytes(entry.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))

    def restore(self) -> None:
        for entry, shape, device, place in reversed(self._kept):
            self._file.seek(place)
            raw = bytearray(self._file.read(shape.numel() * entry.element_size()))
            values = torch.frombuffer(raw, dtype=entry.dtype) if raw else entry.new_empty(0, device="cpu")
            reshape_leaf(entry, values.reshape(shape).to(device))

    def close(self) -> None:
        self._file.close()
