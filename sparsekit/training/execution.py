"""Execution: how a learnable mask runs its model, physically narrow, or wider where dropped units are looked at."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import wide
from sparsekit.graph.mask import UnitMask
from sparsekit.graph.state import StateDict
from sparsekit.surgery.compaction import guard_pretrained
from sparsekit.training.narrow_model import NarrowModel, Rules
from sparsekit.training.unit_vectors import Reader, UnitVectors
from sparsekit.training.widening import DenseModel, Probe, Widening, straight_through_gates


class _GateGradient(torch.autograd.Function):
    """Identity on a leaf; sends Σ gradient · weight of each unit's entries to the scores."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, scores: Tensor, readers: list[Reader], units: list[Tensor]) -> Tensor:
        ctx.save_for_backward(leaf)
        ctx.readers, ctx.units, ctx.total = readers, units, scores.numel()
        return leaf.view_as(leaf)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (leaf,) = ctx.saved_tensors
        fused = wide(leaf).new_zeros(ctx.total + 1)
        for reader, units in zip(ctx.readers, ctx.units, strict=True):
            fused.index_add_(0, units, reader.products(leaf, gradient))
        return gradient, fused[:-1], None, None


class Execution:
    """Runs the narrow module of a `NarrowModel`, and wider copies of it where a pass must see dropped units."""

    def __init__(self, model: nn.Module, graph: UnitGraph, rules: Rules | None = None) -> None:
        self.graph = graph
        self._wide: dict[tuple[str, ...], tuple[tuple[int, ...], DenseModel]] = {}
        self._widenings: dict[tuple[str, ...], Widening] = {}
        self._widenings_of = -1
        self.narrow_model = NarrowModel(model, graph, rules=rules)
        self.module = self.narrow_model.module

    @cached_property
    def fused(self) -> UnitVectors:
        """Vectors over the units; made when first asked for, as a graph without groups has none."""
        with torch.inference_mode(False):  # its tables outlive the call that asks
            return UnitVectors(self.narrow_model)

    @property
    def mask(self) -> UnitMask:
        """What is kept."""
        return self.narrow_model.mask

    def call(self, scores: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], *, explore: float) -> Any:
        """Run the sparse model.

        Scores, float (J,), that need a gradient get that of each kept unit's gate. With `explore` not 0 the dense model runs,
        where dropped units have a gradient too, which reaches the scores times `explore`.
        """
        if not (torch.is_grad_enabled() and scores.requires_grad):
            return self.module(*args, **kwargs)
        if explore:
            gates = straight_through_gates(self.graph, self.mask, scores, explore)
            return self._widened(tuple(self.graph.groups), args, kwargs, gates)[0]
        apply: Any = _GateGradient.apply
        gated = {name: apply(leaf, scores, readers, units) for name, leaf, readers, units in self.fused.gated_leaves()}
        return functional_call(self.module, gated, args, kwargs)

    def explore(self, groups: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Probe]]:
        """Run the sparse model with the dropped units of `groups` behind gates of 0.

        Returns:
            The outputs, the same as without them, and the entries that read units of the groups.
        """
        return self._widened(tuple(groups), args, kwargs, None)

    def _widened(
        self, groups: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], gates: Mapping[str, Tensor] | None
    ) -> tuple[Any, list[Probe]]:
        if self._widenings_of != self.narrow_model.version:
            self._widenings, self._widenings_of = {}, self.narrow_model.version
        if groups not in self._widenings:
            self._widenings[groups] = Widening(self.narrow_model, groups)
        widening = self._widenings[groups]
        sizes = tuple(widening.mask.counts().values())
        if groups not in self._wide or self._wide[groups][0] != sizes:
            narrow = self.narrow_model
            self._wide[groups] = sizes, DenseModel(self.module, self.graph, widening.mask, narrow.sizes, narrow.rules)
        return widening.call(self._wide[groups][1], args, kwargs, gates)

    def release(self) -> None:
        """Let go of what the last exploring passes ran on, after their step."""
        for _, model in self._wide.values():
            model.release()

    def load(self, state: StateDict, mask: UnitMask, *, magnitudes: Tensor | None = None) -> None:
        """Start from a dense state under a mask, as `NarrowModel.load` does, and let the vectors follow.

        `magnitudes` is what `magnitudes_of` says of the state, if that is known.
        """
        self.narrow_model.load(state, mask)
        self.fused.reload(magnitudes)

    def compact(self) -> nn.Module:
        """The sparse model as a plain, smaller module; a copy."""
        return guard_pretrained(self.narrow_model.compact(), cut=not all(bool(keep.all()) for keep in self.mask.values()))

    def apply_to_tensors(self, function: Callable[[Tensor], Tensor]) -> None:
        """Move tensors that are not parameters or buffers of `module`."""
        self.narrow_model.apply_to_tensors(function)
        vars(self).pop("fused", None)  # made anew where the model is now, of weights that may have been rounded
        self._wide, self._widenings_of = {}, -1  # they may hold buffers that are not in the state
