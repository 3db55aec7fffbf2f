"""LiveEntries: the private numbers that verification runs on, silenced in place where a mask drops units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparsekit.graph.graph import UnitGraph
from sparsekit.layers.labels.values import IntArray

BoolArray: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class GatedAxis:
    """Where gates act along one axis of one entry: `positions` belong to `units`, numbered through all groups."""

    name: str
    dim: int
    positions: IntArray
    units: IntArray


def gated_axes(graph: UnitGraph, entries: Mapping[str, Tensor]) -> list[GatedAxis]:
    """Every axis on which gates act; of tied names the first stands for all."""
    parts: dict[tuple[int, int], tuple[str, list[IntArray], list[IntArray]]] = {}
    first = 0
    for group in graph.groups.values():
        numbers = np.arange(first, first + group.size)
        first += group.size
        for piece in group.slices:
            if piece.gated:
                name, positions, units = parts.setdefault((id(entries[piece.name]), piece.dim), (piece.name, [], []))
                if piece.name == name:
                    positions.append(piece.index.numpy().reshape(-1))
                    units.append(numbers.repeat(piece.span))
    return [
        GatedAxis(name, dim, np.concatenate(positions), np.concatenate(units))
        for (_, dim), (name, positions, units) in parts.items()
    ]


class LiveEntries:
    """Entries with live statistics, scales and biases, so that a fresh zero cannot hide an error.

    Args:
        entries: Those of the model; read only.
        dtype: Type of floating entries; None keeps theirs.
        generator: For what is disturbed.
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
        with torch.no_grad():
            for value in self._buffers:
                value.copy_(self._origin[id(value)])

    def silence(self, gated: Sequence[GatedAxis], kept: BoolArray) -> None:
        """Zero what gates of 0 would zero, in place, having put back what was zeroed before.

        In place, since a gated copy of every entry is most of the cost of verifying a large model.

        Args:
            gated: Where gates act.
            kept: bool (J,): which of all units are kept.
        """
        with torch.no_grad():
            for value in self._silenced.values():
                value.copy_(self._origin[id(value)])
            self._silenced = {}
            for axis in gated:
                value = self.values[axis.name]
                dropped = torch.from_numpy(axis.positions[~kept[axis.units]])
                if dropped.numel():
                    self._silenced[id(value)] = value
                    value.index_fill_(axis.dim, dropped.to(value.device), 0)


def _any(tensor: Tensor) -> bool:
    # The first numbers nearly always tell.
    return bool(tensor.reshape(-1)[:8].any()) or bool(tensor.any())
