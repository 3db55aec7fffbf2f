"""Layer and trace_layers(): the layers of a model in the order in which one forward pass reads their entries.

A graph of units says what can be removed; the layers say what comes before what. Methods that keep the output layer to
themselves, that leave it out of pruning, or that train the first layers only, read it off here and from no name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit._torch import DispatchMode, tree_leaves, without_fast_path
from sparsekit.errors import TraceError
from sparsekit.graph.layers import Layer
from sparsekit.surgery.rebuild import copy_with, named_entries


class _Reads(DispatchMode):
    """Notes which entries each operator reads; of tied names the first."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names  # by the identity of the tensor: entries may share memory
        self.events: list[list[str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = [self._names[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._names]
        if found:
            self.events.append(found)
        return func(*args, **kwargs)


def trace_layers(model: nn.Module, *example_inputs: Any, **example_kwargs: Any) -> tuple[Layer, ...]:
    """Run the model once and note who reads what, in which order.

    Args:
        model: Any module; a copy of it runs.
        *example_inputs: One call's inputs.
        **example_kwargs: Keyword inputs.

    Returns:
        The layers in forward order; every key of the state belongs to exactly one, tied keys to that of the first.

    Raises:
        TraceError: the model fails on the inputs.
    """
    private = copy_with(model, {}).eval()
    tensors = named_entries(private)
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), name)
    reads = _Reads(names)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), without_fast_path(), reads:
            private(*example_inputs, **example_kwargs)
    except Exception as error:
        raise TraceError(f"the model failed on the example inputs: {error}") from error
    return _layers(reads.events, tensors, {name: names[id(tensor)] for name, tensor in tensors.items()})


def _layers(events: Sequence[Sequence[str]], tensors: Mapping[str, Tensor], ties: Mapping[str, str]) -> tuple[Layer, ...]:
    found: list[tuple[str, list[str], list[str]]] = []
    seen: set[str] = set()
    for event in events:
        wide = [name for name in event if tensors[name].dim() > 1]
        owner = _owner(wide[0]) if wide else ""
        # What comes before the first matrix, such as a norm of the inputs, belongs to the layer of that matrix.
        begun = bool(found) and any(tensors[name].dim() > 1 for name in found[-1][2])
        if not found or (wide and begun and owner != found[-1][0]):
            found.append((owner, [], []))
        elif wide and not begun:
            found[-1] = (owner, *found[-1][1:])
        _, entries, read = found[-1]
        read += [name for name in event if name not in read]
        entries += [name for name in dict.fromkeys(event) if name not in seen]
        seen.update(event)
    # A layer that is called again owns nothing new; only as the last one it matters, since it then makes the outputs.
    found = [layer for place, layer in enumerate(found) if layer[1] or place == len(found) - 1]
    _add_unread(found, tensors, ties)
    # Within a layer in the order of the state: kernels of one module read its entries in orders of their own.
    place = {name: number for number, name in enumerate(tensors)}
    layers = []
    for name, entries, read in found:
        frozen = [key for key in read if isinstance(tensors[key], nn.Parameter) and not tensors[key].requires_grad]
        layers.append(Layer(name, *(tuple(sorted(keys, key=place.__getitem__)) for keys in (entries, read, frozen))))
    return tuple(layers)


def _add_unread(found: list[tuple[str, list[str], list[str]]], tensors: Mapping[str, Tensor], ties: Mapping[str, str]) -> None:
    """Give every key that no pass reads to the layer of its tied key or of its module, and what is left to the first."""
    if not found:
        found.append(("", [], []))
    homes = {name: entries for _, entries, _ in found for name in entries}
    owners: dict[str, list[str]] = {}
    for _, entries, _ in found:
        for name in entries:
            owners.setdefault(_owner(name), entries)
    for name in tensors:
        if name not in homes:
            home = homes.get(ties[name], owners.get(_owner(name), found[0][1]))
            home.append(name)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
