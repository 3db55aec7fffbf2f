"""Layer and trace_layers(): the layers of a model, in the order that one forward pass reads their entries.

A graph of units says what can be removed; the layers say what comes before what. Methods that keep the output layer private,
exclude it from pruning, or train only the first layers use this order, never the names of layers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from sparsekit._torch import DispatchMode
from sparsekit.errors import TraceError
from sparsekit.graph.layers import Layer
from sparsekit.surgery.rebuild import named_entries
from sparsekit.tracing.inputs import ModelInputs
from sparsekit.tracing.ops.call import tensors_of
from sparsekit.tracing.passes import ReadOnly, lent_copy, private_passes


class _Reads(DispatchMode):
    """Notes which entries each operator of a pass reads, by the names given for their ids."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self.events: list[list[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = tensors_of((*args, *(kwargs or {}).values()))
        self.events.append([self._names[id(tensor)] for tensor in read if id(tensor) in self._names])
        return func(*args, **(kwargs or {}))


def trace_layers(model: nn.Module, *example_inputs: Any, **example_kwargs: Any) -> tuple[Layer, ...]:
    """Run the model once, and record the reads of each module in their order.

    Args:
        model: Any module; a copy of it runs.
        *example_inputs: One call's inputs.
        **example_kwargs: Keyword inputs.

    Returns:
        The layers in forward order; every key of the state belongs to exactly one, tied keys to the layer of the first.

    Raises:
        TraceError: the model fails on the inputs.
    """
    private = lent_copy(model).eval()
    tensors = named_entries(private)
    names: dict[int, str] = {}  # id of the entry → name; of tied names the first
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), name)
    ties = {name: names[id(tensor)] for name, tensor in tensors.items()}
    seen = _Reads(names)
    try:
        with private_passes():
            ModelInputs(example_inputs, example_kwargs, ReadOnly(model)).call(private, seen)
    except Exception as error:
        raise TraceError(f"the model failed on the example inputs: {error}") from error
    return _layers(seen.events, tensors, ties)


def _layers(events: Sequence[Sequence[str]], tensors: Mapping[str, Tensor], ties: Mapping[str, str]) -> tuple[Layer, ...]:
    found: list[tuple[str, list[str], list[str]]] = [("", [], [])]  # owner, entries, reads
    homes: dict[str, list[str]] = {}  # name → the entries that it is among
    for event in filter(None, events):
        wide = [name for name in event if tensors[name].dim() > 1]
        if wide and not any(tensors[name].dim() > 1 for name in found[-1][2]):
            # What comes before the first matrix, such as a norm of the inputs, belongs to the layer of that matrix.
            found[-1] = (_owner(wide[0]), *found[-1][1:])
        elif wide and _owner(wide[0]) != found[-1][0]:
            found.append((_owner(wide[0]), [], []))
        _, entries, read = found[-1]
        read += [name for name in event if name not in read]
        fresh = [name for name in dict.fromkeys(event) if name not in homes]
        entries += fresh
        homes |= dict.fromkeys(fresh, entries)
    # A layer that is called again owns nothing new; only as the last one it matters, since it then makes the outputs.
    found = [layer for place, layer in enumerate(found) if layer[1] or place == len(found) - 1]
    owners: dict[str, list[str]] = {}
    for name, entries in homes.items():
        owners.setdefault(_owner(name), entries)
    for name in tensors:  # what no pass reads is with its tied key or its module, and what is left with the first layer
        if name not in homes:
            homes.get(ties[name], owners.get(_owner(name), found[0][1])).append(name)
    # Within a layer in the order of the state: kernels of one module read its entries in orders of their own.
    place = {name: number for number, name in enumerate(tensors)}
    layers = []
    for name, entries, read in found:
        frozen = [key for key in read if isinstance(tensors[key], nn.Parameter) and not tensors[key].requires_grad]
        layers.append(Layer(name, *(tuple(sorted(keys, key=place.__getitem__)) for keys in (entries, read, frozen))))
    return tuple(layers)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
