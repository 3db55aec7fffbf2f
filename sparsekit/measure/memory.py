"""Peak memory of the activations in a forward pass, as a function of the widths.

One pass notes which tensors are alive after each operator; a few more tell how their shapes follow the widths. Weights and
inputs are not counted, nor is scratch memory inside an operator.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsekit._torch import DispatchMode, storage_id, tree_leaves, without_fast_path
from sparsekit.graph.graph import UnitGraph
from sparsekit.layers import LayerRule
from sparsekit.measure.shapes import probe_shapes, without_data
from sparsekit.measure.volumes import Array, Meter, Volumes
from sparsekit.tracing.inputs import find_tensors


class _Lives(DispatchMode):
    """Notes every tensor that gets memory of its own, and which of them are alive after each operator."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known = known  # memory of entries and inputs
        self.number: dict[int, int] = {}  # memory → number of the allocation that it is of
        self.holders: dict[int, int] = {}  # memory → tensors alive in it
        self.shapes: list[tuple[int, ...]] = []
        self.widths: list[int] = []  # bytes of a number
        self.alive: set[int] = set()
        self.moments: list[frozenset[int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        grown = False
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                grown |= self._note(tensor)
        if grown:
            self.moments.append(frozenset(self.alive))
        return result

    def _note(self, tensor: Tensor) -> bool:
        place = storage_id(tensor)
        if place in self.known:
            return False
        new = place not in self.number
        if new:
            self.number[place] = len(self.shapes)
            self.alive.add(len(self.shapes))
            self.shapes.append(tuple(tensor.shape))
            self.widths.append(tensor.element_size())
        self.holders[place] = self.holders.get(place, 0) + 1
        weakref.finalize(tensor, self._free, place)
        return new

    def _free(self, place: int) -> None:
        self.holders[place] -= 1
        if not self.holders[place]:
            self.alive.discard(self.number.pop(place))
            del self.holders[place]


class MemoryMeter(Meter):
    """Peak bytes of the activations."""

    def __init__(self, volumes: Volumes, alive: Array) -> None:
        """Set up the meter.

        Args:
            volumes: The bytes of each tensor.
            alive: float (moments, tensors), 1 where a tensor is alive.
        """
        self.volumes, self._alive = volumes, alive

    def read(self, entries: Array) -> float:
        return float((self._alive @ entries).max(initial=0.0))

    def gain(self, now: Array, then: Array, limit: float) -> float:
        """Return by how many bytes the moments above the limit come down together, per such moment."""
        moments = self._alive @ now
        above = moments > limit
        down = self._alive[above] @ (now - then)
        return float(np.minimum(down, moments[above] - limit).sum() / above.sum())


def measure_memory(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    graph: UnitGraph,
    rules: Mapping[type[nn.Module], LayerRule] | None = None,
) -> MemoryMeter:
    """Make the meter of the dense model, for the batch that the peak is of.

    Raises:
        TraceError: the model fails on the inputs.
    """

    def lives(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Lives:
        known = {storage_id(entry) for entry in [*module.parameters(), *module.buffers()]}
        watch = _Lives(known | {storage_id(tensor) for tensor in find_tensors([*args, *kwargs.values()])})
        with torch.no_grad(), without_fast_path(), watch:
            module(*args, **kwargs)
        return watch

    light, *call, dense = without_data(model, args, kwargs, lives)
    shapes = probe_shapes(light, graph, lambda module: lives(module, *call).shapes, rules)
    in_bytes = [((width, {}), *axes) for width, axes in zip(dense.widths, shapes, strict=True)]
    # A moment whose tensors are all alive at the next one too is not a peak.
    peaks = [now for now, then in zip(dense.moments, [*dense.moments[1:], frozenset()]) if not now <= then]
    alive = np.zeros((len(peaks), len(shapes)))
    for place, moment in enumerate(peaks):
        alive[place, list(moment)] = 1.0
    return MemoryMeter(Volumes(in_bytes, [tied[0] for tied in graph.tied_sets]), alive)
