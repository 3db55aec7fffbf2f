"""Averages over units, as a trace noted them, and the norm sites that become of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from sparsekit.graph.groups import NormSite
from sparsekit.layers.labels.tracer import Tracer
from sparsekit.layers.labels.values import IntArray


def find_sites(tracer: Tracer, root: IntArray, nodes: Mapping[str, IntArray]) -> tuple[NormSite, ...] | None:
    """The norms over units that stay in some group, one for each call that averages over them.

    Where one and the same call saw different units from time to time, they are fixed.

    Args:
        tracer: What a trace noted.
        root: The lowest node of each node's component.
        nodes: Group → the root of each of its units.

    Returns:
        None if units were fixed, so that groups must be built again.
    """
    sites, fixed = [], False
    units_of = nodes.items() if tracer.norms else ()
    unit_of = {int(root): (name, unit) for name, roots in units_of for unit, root in enumerate(roots)}
    for (module, number), met in tracer.norms.items():
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
                tracer.fix(note.nodes, note.cause)
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
