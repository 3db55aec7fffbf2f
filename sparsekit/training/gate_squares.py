"""GateSquares: Σ (∂L/∂gate)² over the examples of a training step, from its own backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit.criteria.gate_gradients import inputs_of, unit_readers
from sparsekit.graph.edit import compact_graph
from sparsekit.graph.index import wide
from sparsekit.runtime.narrow_attention import NarrowMultiheadAttention
from sparsekit.training.importance import UnitVectors, split_units


class GateSquares:
    """Measure the units of a narrow model while it trains.

    If linear layers and convolutions with the examples on the first axis read the units, each example is squared by itself:
    ∂L/∂gate = Σ x·∂L/∂x at the inputs of these layers, which also exists if they are frozen. Elsewhere, it is B times the
    square for the batch of B examples, from the gradients of the weights.
    """

    def __init__(self, vectors: UnitVectors) -> None:
        self._vectors = vectors
        model = vectors.narrow_model.module
        for module in model.modules():
            if type(module) is nn.MultiheadAttention:  # a fused kernel would not call the layer that reads the heads
                module.__class__ = NarrowMultiheadAttention
        compiled = any(hasattr(module, "_orig_mod") for module in model.modules())  # its hooks would compile it again
        self._readers = (
            {} if compiled else unit_readers(model, compact_graph(vectors.narrow_model.graph, vectors.narrow_model.mask))
        )
        self.version = vectors.narrow_model.version  # version of the narrow model for whose mask this was made
        self._passes: list[dict[str, Tensor]] = []
        """Group name → Σ x·∂L/∂x, float (examples, units), of each pass since the last step; empty before its backward pass."""

    def run(self, call: Callable[[], Any], examples: int, *, fresh: bool) -> Any:
        """Run a forward pass, the first of its step if `fresh`, and measure in its backward pass."""
        if fresh:
            self._passes = [each for each in self._passes if not each]
        layers = {layer for found in self._readers.values() for layer, _, _ in found or ()}
        with inputs_of(layers, differentiable=True) as calls:
            outputs = call()
        sums: dict[str, Tensor] = {}
        for name, found in self._readers.items():
            inputs = [(x, piece, axis) for layer, piece, axis in found or () for x in calls.get(layer, ())]
            if inputs and all(x.dim() >= 1 - axis and x.shape[0] == examples for x, _, axis in inputs):
                for x, piece, axis in inputs:
                    x.register_hook(partial(_add, sums, name, x.detach(), piece.index, axis))
        self._passes.append(sums)
        return outputs

    def take(self, gradients: Mapping[Tensor, Tensor] | None, examples: int, scale: Tensor | None, group: Any) -> Tensor:
        """Return ½·B·g² of every unit, float (J,), 0 for absent units, and begin again.

        `gradients`: weight → gradient, or None for `.grad`; `scale`: the factor of a GradScaler that they still contain;
        `group`: the process group over which gradients of the weights were averaged.
        """
        ranks = 1 if group is None else torch.distributed.get_world_size(group)
        graph = self._vectors.narrow_model.graph
        found = 0.5 * examples * self._vectors.gate_gradient(gradients).square()
        for name, part in split_units(graph, found).items():
            rows = [each[name] for each in self._passes if name in each]
            if rows:
                own = torch.stack([0.5 * len(each) / ranks * each.square().sum(0) for each in rows]).sum(0)
                kept = split_units(graph, self._vectors.kept)[name]
                part[kept] = torch.nan_to_num(own.to(part), nan=0.0, posinf=0.0)
        if group is not None:
            torch.distributed.all_reduce(found, group=group)
        self._passes = []
        return found if scale is None else found / scale**2


def _add(sums: dict[str, Tensor], name: str, x: Tensor, index: Tensor, axis: int, gradient: Tensor) -> None:
    product = (wide(x) * wide(gradient)).movedim(axis, -1)
    rows = product.reshape(x.shape[0], -1, product.shape[-1]).sum(1)[:, index.to(x.device)].sum(-1)
    sums[name] = sums[name] + rows if name in sums else rows
