"""Slots: which dense position each narrow position holds, per entry and axis.

A group of which k units are kept has k slots. A slot keeps its narrow positions for as long as the counts stand; only
the unit in it changes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparsekit.errors import ForeignMaskError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import UnitSlice
from sparsekit.graph.index import Axes, cut_axes, gather, places, scatter_
from sparsekit.graph.mask import UnitMask

Move = tuple[Tensor, Tensor]
"""(slots, units): int64 (changed,) each; the slot and the unit that takes it."""


def moves_to(units: Tensor, keep: Tensor) -> Move:
    """Return the slots of `units` that change under `keep`, bool (units,), and their new units in ascending order."""
    entering = keep.clone()
    entering[units] = False
    return (~keep[units]).nonzero().reshape(-1), entering.nonzero().reshape(-1)


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

    def without(self, dim: int | None) -> EntrySlots:
        """The same slots at this moment for a tensor that is a mean over the axis `dim`; themselves for None."""
        if dim is None:
            return self
        positions = {axis: found for axis, found in self.positions.items() if axis != dim}
        other = EntrySlots(positions, [table for table in self.tables if table[1].dim != dim])
        other._ascending = self._ascending
        return other

    def _axes(self, shape: torch.Size) -> Axes:
        """The axes along which narrow and dense positions differ."""
        return cut_axes(shape, self.positions) if self._ascending else self.positions

    def gather(self, dense: Tensor) -> Tensor:
        """The narrow entry: a new tensor."""
        narrow = gather(dense, self._axes(dense.shape))
        return narrow.clone() if narrow is dense else narrow

    def scatter(self, narrow: Tensor, dense: Tensor) -> Tensor:
        """Write a narrow entry into `dense`, in place, and return `dense`."""
        return scatter_(narrow, dense, self._axes(dense.shape))

    def sorted(self, narrow: Tensor) -> Tensor:
        """A copy of the narrow entry with its positions in ascending dense order."""
        if self._ascending:
            return narrow.clone()
        return gather(narrow, {dim: positions.argsort() for dim, positions in self.positions.items()})

    def changed_positions(self, moves: Mapping[str, Move]) -> dict[int, Tensor]:
        """Axis → narrow positions whose unit changes; empty where nothing changes."""
        found: dict[int, list[Tensor]] = {}
        for group, piece, table in self.tables:
            if group in moves:
                found.setdefault(piece.dim, []).append(table[moves[group][0]].reshape(-1))
        return {dim: torch.cat(parts) for dim, parts in found.items()}

    def save(self, narrow: Tensor, dense: Tensor, changed: Axes) -> None:
        """Write the values at the `changed` narrow positions back into `dense`."""
        for dim, chosen in self._own(changed):
            scatter_(gather(narrow, {dim: chosen}), dense, self._block(dense.shape, dim, chosen))

    def reassign(self, moves: Mapping[str, Move]) -> None:
        """Give the changed slots the positions of their new units."""
        for group, piece, table in self.tables:
            if group in moves:
                slots, units = moves[group]
                self.positions[piece.dim] = self.positions[piece.dim].index_copy(
                    0, table[slots].reshape(-1), piece.index[units].reshape(-1)
                )
                self._ascending = False

    def fetch(self, narrow: Tensor, dense: Tensor, changed: Mapping[int, Tensor]) -> None:
        """Read the values at the `changed` narrow positions from `dense`."""
        for dim, chosen in self._own(changed):
            narrow.index_copy_(dim, chosen.to(narrow.device), gather(dense, self._block(dense.shape, dim, chosen)))

    def _own(self, changed: Axes) -> list[tuple[int, Tensor]]:
        return [(dim, chosen) for dim, chosen in changed.items() if dim in self.positions]

    def _block(self, shape: torch.Size, dim: int, chosen: Tensor) -> Axes:
        """Dense positions of the `chosen` narrow positions along `dim`, and of all narrow positions along other axes."""
        return {**self._axes(shape), dim: self.positions[dim][chosen]}


def build_slots(
    graph: UnitGraph, mask: UnitMask, order: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[str, EntrySlots]]:
    """Slots of all groups and entries under `mask`.

    `order` is group name → int64 (kept,), the unit in each slot; ascending where not given.

    Returns:
        Group name → int64 (kept,), the unit in each slot; state-dict key → slots.

    Raises:
        ForeignMaskError: the order does not hold the units that the mask keeps.
    """
    units = {name: mask[name].cpu().nonzero().reshape(-1) for name in graph.groups}
    indices = graph.kept_indices(mask)
    entries: dict[str, EntrySlots] = {}
    for name, shape in graph.shapes.items():
        axes, pieces = indices.get(name, {}), graph.slices_of.get(name, ())
        narrow_of = {dim: places(positions, shape[dim]) for dim, positions in axes.items()}
        tables = [(group, piece, narrow_of[piece.dim][piece.index[units[group]]]) for group, piece in pieces]
        entries[name] = EntrySlots(dict(axes), tables)
    moves: dict[str, Move] = {}
    for name, given in (order or {}).items():
        given = given.cpu()
        if name not in units or not torch.equal(given.sort().values, units[name]):
            raise ForeignMaskError(f"the order of slots of group {name!r} does not hold the units that the mask keeps")
        if not torch.equal(given, units[name]):
            moves[name], units[name] = (torch.arange(given.numel()), given), given
    for entry in entries.values():
        entry.reassign(moves)
    return units, entries
