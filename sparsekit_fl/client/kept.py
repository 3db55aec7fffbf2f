"""Which entries of a state travel under a mask: gather them, put them back, add them up."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsekit.graph import StateDict, UnitGraph, UnitMask, WeightMask, add_, cut_axes, gather, narrow_shape, scatter_

Mask = UnitMask | WeightMask
"""What is kept, by unit or by entry."""


class Kept:
    """The entries that a mask keeps, for every key of a model's state.

    A unit mask keeps a narrow tensor (the shape that the compact model has), a weight mask a 1-D tensor of the kept
    entries in row-major order, no mask everything; keys of which the mask drops nothing are kept whole, in their own shape.

    Args:
        graph: The units and shapes of the model.
        mask: What is kept; None keeps all.
    """

    def __init__(self, graph: UnitGraph, mask: Mask | None) -> None:
        self.graph = graph
        self.mask = mask
        self._axes: dict[str, dict[int, Tensor]] = {}
        self._flat: dict[str, Tensor] = {}
        if isinstance(mask, UnitMask):
            # A full axis needs no index, so a mask that keeps everything costs what no mask costs.
            cut = {name: cut_axes(graph.shapes[name], axes) for name, axes in graph.kept_indices(mask).items()}
            self._axes = {name: axes for name, axes in cut.items() if axes}
        elif mask is not None:
            # Likewise an entry of which nothing is dropped.
            partial = {name: keep.cpu().reshape(-1) for name, keep in mask.items() if not bool(keep.all())}
            self._flat = {name: keep.nonzero().reshape(-1) for name, keep in partial.items()}

    def is_whole(self, name: str) -> bool:
        """True where every entry of `name` is kept and its shape is the model's."""
        return name not in self._axes and name not in self._flat

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of what is kept of `name`."""
        if name in self._flat:
            return (self._flat[name].numel(),)
        return tuple(narrow_shape(self.graph.shapes[name], self._axes.get(name, {})))

    def gather(self, name: str, tensor: Tensor) -> Tensor:
        """What is kept of the dense `tensor`; a view where everything is."""
        if name in self._flat:
            return tensor.reshape(-1).index_select(0, self._flat[name].to(tensor.device))
        return gather(tensor, self._axes.get(name, {}))

    def scatter(self, name: str, kept: Tensor, into: Tensor) -> None:
        """Write what is kept into the dense tensor `into`, in place."""
        if name in self._flat:
            into.view(-1)[self._flat[name]] = kept
        else:
            scatter_(kept, into, self._axes.get(name, {}))

    def scatter_rows(self, name: str, kept: Tensor, into: Tensor, start: int) -> None:
        """Write what is kept of some rows, those of `into`, in place: the positions on the first axis from `start` on.

        Args:
            name: State-dict key of an entry with at least one axis.
            kept: All that is kept of it.
            into: Dense, (rows, …).
            start: Position of the first row.
        """
        stop = start + len(into)
        if name in self._flat:
            positions, row = self._flat[name], math.prod(self.graph.shapes[name][1:])
            low, high = torch.searchsorted(positions, torch.tensor([start * row, stop * row])).tolist()
            into.view(-1)[positions[low:high] - start * row] = kept[low:high]
            return
        axes = dict(self._axes.get(name, {}))
        rows = axes.pop(0, None)
        if rows is None:
            scatter_(kept[start:stop], into, axes)
            return
        low, high = torch.searchsorted(rows, torch.tensor([start, stop])).tolist()
        if high > low:
            scatter_(kept[low:high], into, {**axes, 0: rows[low:high] - start})

    def add(self, name: str, kept: Tensor | float, into: Tensor) -> None:
        """Add to the kept entries of the dense tensor `into`, in place; a number is added to each."""
        if name in self._flat:
            into.view(-1)[self._flat[name]] += kept
        else:
            add_(kept, into, self._axes.get(name, {}))

    def gather_all(self, state: StateDict) -> dict[str, Tensor]:
        """What is kept of each entry of a dense state."""
        return {name: self.gather(name, tensor) for name, tensor in state.items()}

    def scatter_all(self, kept: StateDict, into: StateDict) -> dict[str, Tensor]:
        """A new dense state: `into` with the kept entries written over it."""
        result: dict[str, Tensor] = {}
        for name, tensor in kept.items():
            if self.is_whole(name):
                result[name] = tensor.detach().clone()
            else:
                result[name] = into[name].detach().clone()
                self.scatter(name, tensor, result[name])
        return result


def mask_state(graph: UnitGraph, mask: Mask | None, state: StateDict) -> dict[str, Tensor]:
    """A dense state in which everything that `mask` drops is zero; untouched keys are the same tensors."""
    kept = Kept(graph, mask)
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if kept.is_whole(name):
            result[name] = tensor
        else:
            result[name] = torch.zeros_like(tensor)
            kept.scatter(name, kept.gather(name, tensor), result[name])
    return result
