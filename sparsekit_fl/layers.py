"""Layers of a model, in the order in which a forward pass uses their weights.

Methods that keep the output layer private, exclude it from pruning, or train only the first layers rely on this order, not on
the names of layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit.tracing import entry_reads

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Layer:
    """A module that uses a state entry of two or more axes, with all entries that are used before the next such module."""

    name: str
    entries: tuple[str, ...]
    """State-dict keys that this layer is the first to use. Keys that the pass does not use are in the layer of their module."""
    reads: tuple[str, ...]  # all keys that it uses, including those of earlier layers, as in a decoder tied to an embedding
    weights: Mapping[str, torch.Size] = field(default_factory=dict)
    """Key → shape of the `entries` that are not frozen and have at least two axes and two elements."""


def head_entries(layers: Sequence[Layer], count: int = 1) -> tuple[str, ...]:
    """Return the state-dict keys of the last `count` layers, without keys that an earlier layer uses too."""
    return tuple(name for layer in layers[max(0, len(layers) - count) :] for name in layer.entries)


def layer_weights(layers: Sequence[Layer]) -> dict[str, torch.Size]:
    """Return key → shape of the weights that a `WeightMask` may prune: all except those that the output layer uses."""
    last = layers[-1].reads if layers else ()
    return {name: shape for layer in layers for name, shape in layer.weights.items() if name not in last}


def prefix_entries(layers: Sequence[Layer], count: int) -> frozenset[str]:
    """Return the state-dict keys of the first `count` layers, without keys that a later layer uses too."""
    later = {name for layer in layers[count:] for name in layer.reads}
    return frozenset(name for layer in layers[:count] for name in layer.entries if name not in later)


def trace_layers(model: nn.Module, example_inputs: Any) -> tuple[Layer, ...]:
    """Run a copy of the model once on a tuple of inputs, and return its layers in forward order.

    Every state-dict key belongs to exactly one layer; tied keys belong to the same layer.

    Raises:
        TraceError: the model fails on the inputs.
    """
    tensors = {name: entry for name, entry in model.state_dict(keep_vars=True).items() if isinstance(entry, Tensor)}
    found: list[tuple[str, list[str], list[str]]] = [("", [], [])]  # name of the module, entries, reads
    homes: dict[str, list[str]] = {}  # key → the list of entries that has it
    for event in entry_reads(model, example_inputs):
        wide = [name for name in event if tensors[name].dim() > 1]
        if wide and not any(tensors[name].dim() > 1 for name in found[-1][2]):
            # Entries before the first matrix, such as a norm of the inputs, belong to the layer of that matrix.
            found[-1] = (_owner(wide[0]), *found[-1][1:])
        elif wide and _owner(wide[0]) != found[-1][0]:
            found.append((_owner(wide[0]), [], []))
        _, own, read = found[-1]
        read += [name for name in event if name not in read]
        fresh = [name for name in dict.fromkeys(event) if name not in homes]
        own += fresh
        homes |= dict.fromkeys(fresh, own)
    # A repeated call adds no entries. It counts only if it is the last one, which computes the outputs.
    found = [layer for place, layer in enumerate(found) if layer[1] or place == len(found) - 1]
    owners: dict[str, list[str]] = {}
    for name, own in homes.items():
        owners.setdefault(_owner(name), own)
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    for name, tensor in tensors.items():  # unused keys go to the layer of their tied key or module, else to the first layer
        if name not in homes:
            homes.get(first[id(tensor)], owners.get(_owner(name), found[0][1])).append(name)
    # Within a layer, sort entries by the order of the state, since the order in which kernels use them may vary.
    place = {name: number for number, name in enumerate(tensors)}
    layers = []
    for name, *keys in found:
        entries, reads = (tuple(sorted(some, key=place.__getitem__)) for some in keys)
        weights = {key: tensors[key].shape for key in reads if key in entries and _trains(tensors[key])}
        layers.append(Layer(name, entries, reads, weights))
    return tuple(layers)


def _trains(tensor: Tensor) -> bool:
    return tensor.dim() > 1 and tensor.numel() > 1 and (tensor.requires_grad or not isinstance(tensor, nn.Parameter))


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
