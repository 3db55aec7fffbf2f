"""LiveEntries: the private numbers that verification runs on, silenced in place where a mask drops units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from sparsekit.graph.graph import UnitGraph


class LiveEntries:
    """Entries with live statistics, scales and biases, so that a fresh zero cannot hide an error.

    Floating ones have `dtype`, or their own for None. Those of the model are read only.
    """

    def __init__(self, entries: Mapping[str, Tensor], dtype: torch.dtype | None, generator: torch.Generator) -> None:
        self.values: dict[str, Tensor] = {}
        self._origin: dict[int, Tensor] = {}  # by the id of the value: what it is restored from
        self._silenced: dict[int, Tensor] = {}
        self._buffers: list[Tensor] = []
        done: dict[int, Tensor] = {}
        for name, own in entries.items():
            if id(own) not in done:
                done[id(own)] = self._one(name, own.detach(), dtype, generator)
                if not isinstance(own, nn.Parameter):
                    self._buffers.append(done[id(own)])
            self.values[name] = done[id(own)]

    def _one(self, name: str, own: Tensor, dtype: torch.dtype | None, generator: torch.Generator) -> Tensor:
        value = own.to(dtype if own.is_floating_point() and dtype is not None else own.dtype, copy=True)
        self._origin[id(value)] = own
        if own.is_floating_point() and (own.dim() <= 1 or not _any(own)):
            noise = torch.empty(own.shape, dtype=value.dtype).uniform_(-1.0, 1.0, generator=generator).to(own.device)
            if name.endswith("running_var"):
                value.copy_(1.0 + 0.5 * noise)
            elif name.endswith("running_mean"):
                value.copy_(0.5 * noise)
            else:
                value.add_(0.3 * noise)
            self._origin[id(value)] = value.clone()
        return value

    def restore_buffers(self) -> None:
        """Undo what a pass in train mode does to statistics."""
        self._restore(self._buffers)

    def silence(self, graph: UnitGraph, keep: Mapping[str, Tensor]) -> None:
        """Zero what gates of 0 would zero, in place, having put back what was zeroed before.

        In place, since a gated copy of every entry is most of the cost of verifying a large model. `keep`: group name → bool.
        """
        self.restore()
        for name, stays in keep.items():
            for piece in graph.groups[name].slices if not bool(stays.all()) else ():
                if piece.gated:
                    value = self.values[piece.name]
                    self._silenced[id(value)] = value
                    value.index_fill_(piece.dim, piece.index[~stays].reshape(-1).to(value.device), 0)

    def restore(self) -> None:
        """Put back what was zeroed."""
        self._restore(self._silenced.values())
        self._silenced = {}

    def _restore(self, values: Iterable[Tensor]) -> None:
        for value in values:
            value.copy_(self._origin[id(value)])


def _any(tensor: Tensor) -> bool:
    # The first numbers nearly always tell.
    return bool(tensor.reshape(-1)[:8].any()) or bool(tensor.any())
