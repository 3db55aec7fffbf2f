"""Layer: which module reads which entries, and what follows from the order of the layers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Layer:
    """A module that reads at least one entry of two or more axes, with the entries read until the next such module."""

    name: str
    entries: tuple[str, ...]
    """State-dict keys that this layer is the first to read; statistics that no pass reads are with their module."""
    reads: tuple[str, ...]  # all that it reads, also entries of earlier layers, as a decoder tied to an embedding does
    frozen: tuple[str, ...] = ()  # the entries among them that need no gradient


def head_entries(layers: Sequence[Layer], count: int = 1) -> tuple[str, ...]:
    """Return state-dict keys of the last `count` of some layers in forward order, without entries that earlier layers read."""
    return tuple(name for layer in layers[max(0, len(layers) - count) :] for name in layer.entries)


def layer_weights(layers: Sequence[Layer], shapes: Mapping[str, torch.Size]) -> tuple[str, ...]:
    """Return state-dict keys of the weight matrices that may be pruned by entry, in forward order.

    These are the weights that train and have at least two axes and two entries, except in the output layer. `shapes`:
    state-dict key → shape.
    """
    last = set(layers[-1].reads) if layers else set()
    return tuple(
        name
        for layer in layers
        for name in layer.reads
        if name in layer.entries
        and name not in layer.frozen
        and name not in last
        and len(shapes[name]) > 1
        and math.prod(shapes[name]) > 1
    )


def prefix_entries(layers: Sequence[Layer], count: int) -> frozenset[str]:
    """Return state-dict keys that the first `count` of some layers in forward order read, and no later one does."""
    later = {name for layer in layers[count:] for name in layer.reads}
    return frozenset(name for layer in layers[:count] for name in layer.entries if name not in later)
