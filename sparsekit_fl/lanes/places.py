"""LanePlaces: which unit is in each slot of each lane, and the dense positions that this gives every entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import group_order
from sparsekit.graph.index import along
from sparsekit.graph.mask import UnitMask
from sparsekit.training.slots import build_slots
from sparsekit_fl.lanes.rows import Place

__all__ = ["LanePlaces"]


class LanePlaces:
    """Slots of several narrow models with equally many slots. A slot of the padding holds no unit, and no position.

    No unit is unit J, and no position is one behind the last: dense tensors have a spare position of zeros there. So lanes
    are read and written by one gather or scatter, whatever their padding is.

    Args:
        graph: The units of the dense model.
        masks: The units that each lane holds, padding included.
        own: Of these, those that count.
        device: Where the tables are.
    """

    def __init__(self, graph: UnitGraph, masks: Sequence[UnitMask], own: Sequence[UnitMask], device: torch.device) -> None:
        self.graph = graph
        self.total = graph.units
        self.offsets = group_order(graph.groups.values())
        self._device = device
        self.spans: dict[str, slice] = {}
        """Group name → its slots."""
        first = 0
        for name in graph.groups:
            count = int(masks[0][name].sum())
            self.spans[name] = slice(first, first + count)
            first += count
        self.slots = first
        self.units: Tensor
        """int64 (lanes, slots): the unit in each slot, counted through all groups; J where there is none."""
        self.positions: dict[str, dict[int, Tensor]] = {}
        """Key → axis → int64 (lanes, narrow size): dense positions."""
        self.tables: dict[tuple[str, int], list[tuple[slice, Tensor, Tensor]]] = {}
        """(key, axis) → for each slice of a group: its slots, (lanes, slots, span) narrow and (J + 1, span) dense positions."""
        self.load(masks, own)

    def load(self, masks: Sequence[UnitMask], own: Sequence[UnitMask]) -> None:
        """Take the masks of other clients, of equally many slots. Tensors that are there are written over."""
        graph, device = self.graph, self._device
        built = [build_slots(graph, mask) for mask in masks]
        units = torch.stack([self._units(groups, real) for (groups, _), real in zip(built, own, strict=True)])
        again = bool(self.positions)
        if not again:
            self.units = units.to(device)
        for key, pieces in graph.slices_of.items():
            entries = [slots[key] for _, slots in built]
            found = {dim: torch.stack([entry.positions[dim] for entry in entries]) for dim in entries[0].positions}
            if again:
                for dim, positions in found.items():
                    self.positions[key][dim].copy_(positions)
            else:
                self.positions[key] = {dim: positions.to(device) for dim, positions in found.items()}
            seen: dict[int, int] = {}
            for place, (group, piece) in enumerate(pieces):
                narrow = torch.stack([entry.tables[place][2] for entry in entries])
                number = seen[piece.dim] = seen.get(piece.dim, -1) + 1
                if again:
                    self.tables[key, piece.dim][number][1].copy_(narrow)
                    continue
                dense = torch.full((self.total + 1, piece.index.shape[1]), graph.shapes[key][piece.dim])
                dense[self.offsets[group] : self.offsets[group] + piece.index.shape[0]] = piece.index
                table = self.spans[group], narrow.to(device), dense.to(device)
                self.tables.setdefault((key, piece.dim), []).append(table)
        self.move(slice(None), units.to(device))

    def _units(self, groups: Mapping[str, Any], own: UnitMask) -> Tensor:
        found = []
        for name, slots in groups.items():
            units = slots.units + self.offsets[name]
            found.append(torch.where(own[name][slots.units], units, self.total))
        return torch.cat(found)

    def move(self, rows: Place, units: Tensor) -> None:
        """Put other units into the slots of some lanes: int64 (rows, slots)."""
        self.units[rows] = units
        for (key, dim), tables in self.tables.items():
            found = self.positions[key][dim][rows]
            for span, narrow, dense in tables:
                own = narrow[rows]
                found = found.scatter(1, own.flatten(1), dense[units[:, span]].flatten(1))
            self.positions[key][dim][rows] = found

    def spare(self, key: str, dense: Tensor) -> Tensor:
        """Copy a dense tensor, with a spare position of zeros behind the last of each axis of units."""
        axes = self.positions[key]
        shape = [size + (dim in axes) for dim, size in enumerate(dense.shape)]
        wide = dense.new_zeros(shape, device=self._device)
        wide[tuple(slice(size) for size in dense.shape)] = dense.to(self._device)
        return wide

    def index(self, key: str, rows: Place, *, lanes: bool = True) -> tuple[Any, ...]:
        """What a dense tensor (lanes, …) with spare positions is indexed with for the narrow entries of some lanes.

        Args:
            key: Of the entry.
            rows: The lanes.
            lanes: Whether the dense tensor has the lanes as its first axis; without, all lanes read one tensor.
        """
        axes = self.positions[key]
        last = max(axes)
        rank = last + 2
        numbers = torch.arange(len(self.units), device=self._device)[rows]
        found: list[Any] = [along(numbers, 0, rank)] if lanes else []
        for dim in range(last + 1):
            if dim in axes:
                own = axes[dim][rows]
            else:
                own = torch.arange(self.graph.shapes[key][dim], device=self._device).unsqueeze(0)
            found.append(own.view(own.shape[0], *[-1 if axis == dim else 1 for axis in range(last + 1)]))
        return tuple(found)

    def mask(self, lane: int) -> UnitMask:
        """Return the units in the slots of a lane."""
        keep = torch.zeros(self.total + 1, dtype=torch.bool)
        keep[self.units[lane].cpu()] = True
        sizes = [group.size for group in self.graph.groups.values()]
        return UnitMask(dict(zip(self.graph.groups, keep[:-1].split(sizes), strict=True)))

    def ascending(self, key: str, lane: int, narrow: Tensor) -> Tensor:
        """Copy a narrow entry of a lane without its padding, positions in ascending dense order."""
        for dim, positions in self.positions[key].items():
            own = positions[lane].to(narrow.device)
            order = own.argsort()[: int((own < self.graph.shapes[key][dim]).sum())]
            narrow = narrow.index_select(dim, order)
        return narrow.clone()
