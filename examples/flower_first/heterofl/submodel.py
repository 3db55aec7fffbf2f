"""The submodel of a ratio: the first units of each layer. The server and the clients compute the same one."""

import torch
from task import EXAMPLE, Net

import sparsekit as sk

GRAPH = sk.trace_units(Net(), (EXAMPLE,))


def first_units(ratio):
    """Return the mask of the units that a client of this ratio trains."""
    counts = sk.allocation.ratio_counts(GRAPH, ratio)
    return sk.UnitMask({name: torch.arange(group.size) < counts[name] for name, group in GRAPH.groups.items()})
