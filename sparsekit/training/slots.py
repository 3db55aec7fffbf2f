"""Slots: which dense position each narrow position holds, per entry and axis.

A group of which k units are kept has k slots. A slot keeps its narrow positions for as long as the counts stand; only
the unit in it changes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparsekit.graph.graph import UnitGraph, UnitSlice
from sparsekit.graph.mask import UnitMask

__all__ = ["EntrySlots", "GroupSlots", "Move", "build_slots"]

Move = tuple[Tensor, Tensor]
"""(slots, units): int64 (changed,) each; the slot and the unit that takes it."""


class GroupSlots:
    """The unit in each slot of one group."""

    def __init__(self, keep: Tensor) -> None:
        self.units = keep.nonzero().reshape(-1)

    def moves(self, keep: Tensor) -> Move:
        """Which slots change when `keep`, bool (units,), replaces the current units. Entering units in ascending order."""
        stays = keep[self.units]
        slots = (~stays).nonzero().reshape(-1)
        entering = keep.clone()
        entering[self.units] = False
        return slots, entering.nonzero().reshape(-1)

    def apply(self, move: Move) -> None:
        """Put the entering units into their slots."""
        self.units = self.units.index_copy(0, *move)


class EntrySlots:
    """Dense positions of the narrow positions of one entry, for each axis that units touch."""

    def __init__(self, positions: dict[int, Tensor], tables: list[tuple[str, UnitSlice, Tensor]]) -> None:
        """Set up.

        Args:
            positions: Axis → int64 (narrow size,), the dense position of each narrow one.
            tables: (group name, slice, int64 (slots, span)): the narrow positions of each slot.
        """
        self.positions = positions
        self.tables = tables
        self._ascending = True

    def _axes(self, rank: int, dim: int | None = None, chosen: Tensor | None = None) -> tuple[object, ...]:
        """Index that selects the cross product of this entry's positions; along `dim` only those `chosen`."""
        index: list[object] = [slice(None)] * rank
        dims = sorted(self.positions)
        for place, axis in enumerate(dims):
            values = self.positions[axis]
            if axis == dim and chosen is not None:
                values = values[chosen]
            # Contiguous axes share one broadcast block; others are made so by full ranges in `_full`.
            index[axis] = values.view([-1 if p == place else 1 for p in range(len(dims))])
        return tuple(index)

    def _full(self, shape: torch.Size, index: tuple[object, ...]) -> tuple[object, ...]:
        """Advanced indices separated by slices would move axes to the front: turn such slices into ranges."""
        dims = [axis for axis, value in enumerate(index) if isinstance(value, Tensor)]
        if len(dims) < 2 or dims == list(range(dims[0], dims[-1] + 1)):
            return index
        span = range(dims[0], dims[-1] + 1)
        out = list(index)
        for axis in span:
            value = index[axis]
            vector = value.reshape(-1) if isinstance(value, Tensor) else torch.arange(shape[axis])
            out[axis] = vector.view([-1 if a == axis else 1 for a in span])
        return tuple(out)

    def gather(self, dense: Tensor) -> Tensor:
        """The narrow entry: a new tensor."""
        narrow = dense
        for dim, positions in self.positions.items():
            if positions.numel() < dense.shape[dim] or not self._ascending:
                narrow = narrow.index_select(dim, positions.to(dense.device))
        return narrow.clone() if narrow is dense else narrow

    def scatter(self, narrow: Tensor, dense: Tensor) -> Tensor:
        """Write a narrow entry into `dense`, in place, and return `dense`."""
        if len(self.positions) == 1:
            dim, positions = next(iter(self.positions.items()))
            return dense.index_copy_(dim, positions.to(dense.device), narrow)
        index = self._full(dense.shape, self._axes(dense.dim()))
        dense[index] = narrow  # type: ignore[index]
        return dense

    def sorted(self, narrow: Tensor) -> Tensor:
        """A copy of the narrow entry with its positions in ascending dense order."""
        if self._ascending:
            return narrow.clone()
        for dim, positions in self.positions.items():
            narrow = narrow.index_select(dim, positions.argsort().to(narrow.device))
        return narrow

    def changed_positions(self, moves: Mapping[str, Move]) -> dict[int, Tensor]:
        """Axis → narrow positions whose unit changes; empty where nothing changes."""
        found: dict[int, list[Tensor]] = {}
        for group, piece, table in self.tables:
            if group in moves:
                found.setdefault(piece.dim, []).append(table[moves[group][0]].reshape(-1))
        return {dim: torch.cat(parts) for dim, parts in found.items()}

    def put_by(self, narrow: Tensor, dense: Tensor, changed: Mapping[int, Tensor]) -> None:
        """Write the values at the `changed` narrow positions back into `dense`."""
        for dim, chosen in changed.items():
            block = narrow.index_select(dim, chosen.to(narrow.device))
            dense[self._full(dense.shape, self._axes(dense.dim(), dim, chosen))] = block  # type: ignore[index]

    def reassign(self, moves: Mapping[str, Move]) -> None:
        """Let the changed slots stand for their new units."""
        for group, piece, table in self.tables:
            if group in moves:
                slots, units = moves[group]
                self.positions[piece.dim] = self.positions[piece.dim].index_copy(
                    0, table[slots].reshape(-1), piece.index[units].reshape(-1)
                )
                self._ascending = False

    def fetch(self, narrow: Tensor, dense: Tensor, changed: Mapping[int, Tensor]) -> None:
        """Read the values at the `changed` narrow positions from `dense`."""
        for dim, chosen in changed.items():
            block = dense[self._full(dense.shape, self._axes(dense.dim(), dim, chosen))]  # type: ignore[index]
            narrow.index_copy_(dim, chosen.to(narrow.device), block)


def build_slots(graph: UnitGraph, mask: UnitMask) -> tuple[dict[str, GroupSlots], dict[str, EntrySlots]]:
    """Slots of all groups and entries under `mask`, units in ascending order.

    Args:
        graph: The units.
        mask: What is kept; must belong to the graph.

    Returns:
        Group name → slots; state-dict key → slots.
    """
    groups = {name: GroupSlots(mask[name].cpu()) for name in graph.groups}
    indices = graph.kept_indices(mask)
    entries: dict[str, EntrySlots] = {}
    for name, pieces in graph.slices_of.items():
        axes = indices[name]
        narrow_of = {}
        for dim, positions in axes.items():
            lookup = torch.full((graph.shapes[name][dim],), -1, dtype=torch.int64)
            lookup[positions] = torch.arange(positions.numel())
            narrow_of[dim] = lookup
        tables = [(group, piece, narrow_of[piece.dim][piece.index[groups[group].units]]) for group, piece in pieces]
        entries[name] = EntrySlots(dict(axes), tables)
    return groups, entries
