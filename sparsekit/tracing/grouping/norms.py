"""Averages over units, as a trace noted them, and the norm sites that become of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from sparsekit.graph.norms import NormSite
from sparsekit.layers.labels.store import Cause, LabelStore
from sparsekit.layers.labels.values import IntArray


@dataclass(frozen=True, eq=False)
class NormNote:
    """One averaging call over units."""

    function: str
    nodes: IntArray
    dim: int
    cause: Cause


NormNotes: TypeAlias = dict[tuple[str, int], list[NormNote | None]]
"""(module, number of the call in a forward pass of it) → what each such call averaged over; None where no units."""


def noted_nodes(notes: NormNotes) -> IntArray:
    """The nodes of all units that are averaged over."""
    found = [note.nodes[note.nodes >= 0] for met in notes.values() for note in met if note is not None]
    return np.concatenate([np.zeros(0, dtype=np.int64), *found])


def find_sites(
    notes: NormNotes, store: LabelStore, root: IntArray, unit_of: Mapping[int, tuple[str, int]]
) -> tuple[NormSite, ...] | None:
    """The norms over units that stay in some group.

    Args:
        notes: What a trace noted.
        store: Where one and the same call saw different units from time to time, these are fixed in it.
        root: The lowest node of each node's component.
        unit_of: Root → (name of the group, number of the unit).

    Returns:
        One site for each call that averages over units; None if units were fixed, so that groups must be built again.
    """
    sites, fixed = [], False
    for (module, number), met in notes.items():
        known = [note for note in met if note is not None]
        units = [np.where(note.nodes >= 0, root[note.nodes], note.nodes) for note in known]
        if not any(int(r) in unit_of for row in units for r in row):
            continue
        first = known[0]
        agree = len(known) == len(met) and all(
            note.function == first.function and note.dim == first.dim and np.array_equal(row, units[0])
            for note, row in zip(known, units, strict=True)
        )
        if not agree:
            fixed = True
            for note in known:
                store.fix(note.nodes, note.cause)
            continue
        places: dict[str, tuple[list[int], list[int]]] = {}
        for position, r in enumerate(units[0].tolist()):
            if r in unit_of:
                group, unit = unit_of[r]
                places.setdefault(group, ([], []))[0].append(position)
                places[group][1].append(unit)
        tensors = {group: (torch.tensor(p), torch.tensor(u)) for group, (p, u) in places.items()}
        sites.append(NormSite(module, number, first.function, first.dim, int(first.nodes.size), tensors))
    return None if fixed else tuple(sites)
