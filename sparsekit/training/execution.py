"""Execution: how a learnable mask runs its model, physically narrow, or dense or wider where dropped units are looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import along, wide
from sparsekit.graph.mask import UnitMask
from sparsekit.graph.state import StateDict
from sparsekit.surgery.optimizer_state import HasState, OptimizerState
from sparsekit.surgery.pretrained import guard_pretrained
from sparsekit.training.dense_model import DenseModel, straight_through_gates
from sparsekit.training.narrow_model import NarrowModel
from sparsekit.training.unit_vectors import Reader, UnitVectors
from sparsekit.training.widening import Probe, Widening

__all__ = ["Execution"]


class _GateGradient(torch.autograd.Function):
    """Identity on a leaf; sends Σ gradient · weight of each unit's entries to the scores."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, scores: Tensor, readers: list[Reader], units: list[Tensor]) -> Tensor:
        ctx.save_for_backward(leaf)
        ctx.readers, ctx.units, ctx.scores = readers, units, scores
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gradient,) = gradients
        (leaf,) = ctx.saved_tensors
        twice = torch.is_grad_enabled()  # with create_graph=True, the gradients themselves depend on the gates
        fused = wide(leaf).new_zeros(ctx.scores.numel() + 1)
        for i, (reader, units) in enumerate(zip(ctx.readers, ctx.units, strict=True)):
            entries = _through_gates(ctx, leaf, but=i) if twice else leaf
            fused.index_add_(0, units, reader.products(entries, gradient))
        return _through_gates(ctx, gradient) if twice else gradient, fused[:-1], None, None


def _through_gates(ctx: Any, entries: Tensor, but: int | None = None) -> Tensor:
    """Multiply by the gates of all readers `but` one, which are 1: the values stay, derivatives by the scores come in."""
    gates = torch.cat([ctx.scores - ctx.scores.detach() + 1.0, ctx.scores.new_ones(1)]).to(entries.dtype)
    for i, (reader, units) in enumerate(zip(ctx.readers, ctx.units, strict=True)):
        if i != but:
            entries = entries * along(gates[units], reader.dim, entries.dim())
    return entries


class Execution:
    """Runs the narrow module of a `NarrowModel`, and wider copies of it where a pass must see dropped units.

    While a unit is dropped, its entries, their optimiser state and its norm statistics do not change.

    Args:
        model: Copied.
        graph: Its units.
    """

    def __init__(self, model: nn.Module, graph: UnitGraph) -> None:
        self.graph = graph
        self._dense: DenseModel | None = None
        self._wide: dict[tuple[int, ...], DenseModel] = {}
        self._widenings: dict[tuple[str, ...], Widening] = {}
        self._widenings_of = -1
        self.narrow_model = NarrowModel(model, graph)
        self._fused: UnitVectors | None = None
        self.module = self.narrow_model.module

    @property
    def fused(self) -> UnitVectors:
        """Vectors over the units; made when first asked for, as a mask that does not learn needs none."""
        if self._fused is None:
            self._fused = UnitVectors(self.narrow_model)
        return self._fused

    @property
    def mask(self) -> UnitMask:
        """What is kept."""
        return self.narrow_model.mask

    def call(self, scores: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], *, explore: float) -> Any:
        """Run the sparse model.

        Args:
            scores: float (J,). If it needs a gradient, it gets that of each kept unit's gate.
            args: Positional arguments.
            kwargs: Keyword arguments.
            explore: Not 0: run the dense model, where dropped units have a gradient too, which reaches `scores` times this.
        """
        if not (torch.is_grad_enabled() and scores.requires_grad):
            return self.module(*args, **kwargs)
        if explore:
            return self._call_dense(scores, args, kwargs, explore)
        apply: Any = _GateGradient.apply
        gated = {name: apply(leaf, scores, readers, units) for name, leaf, readers, units in self.fused.gated_leaves()}
        return functional_call(self.module, gated, args, kwargs)

    def _call_dense(self, scores: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], explore: float) -> Any:
        if self._dense is None:
            self._dense = DenseModel(self.module, self.graph)
        state = self.narrow_model.dense_tensors()
        gated = self.graph.gate(state, straight_through_gates(self.graph, self.mask, scores, explore))
        result = self._dense.call(gated, self.mask, self.module, args, kwargs)
        with torch.no_grad():
            self.narrow_model.store_buffers(gated)
        return result

    def explore(self, groups: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Probe]]:
        """Run the sparse model with the dropped units of `groups` behind gates of 0.

        Returns:
            The outputs, the same as without them, and the entries that read units of the groups.
        """
        narrow_model = self.narrow_model
        if self._widenings_of != narrow_model.version:
            self._widenings, self._widenings_of = {}, narrow_model.version
        names = tuple(groups)
        if names not in self._widenings:
            self._widenings[names] = Widening(narrow_model, names)
        widening = self._widenings[names]
        sizes = tuple(widening.mask.counts().values())
        if sizes not in self._wide:
            self._wide[sizes] = DenseModel(self.module, self.graph, widening.mask)
        return widening.call(self._wide[sizes], args, kwargs)

    def magnitudes(self) -> Tensor:
        """Σ |θ| per unit: float (J,), no gradient."""
        return self.fused.magnitudes()

    def stands(self, scores: Tensor) -> bool:
        """Whether the mask is that of the largest scores, float (J,), in every group; may be False where it is."""
        return self.fused.stands(scores)

    def remask(self, mask: UnitMask, optimizers: Sequence[HasState]) -> None:
        """Change the mask; the state of `optimizers` follows."""
        self.fused.remask(mask, optimizers)

    def load(
        self,
        state: StateDict,
        mask: UnitMask,
        order: Mapping[str, Tensor] | None = None,
        saved: OptimizerState | None = None,
        *,
        magnitudes: Tensor | None = None,
        follow: bool = True,
    ) -> None:
        """Start from a dense state under a mask.

        Args:
            state: The dense state; never written to.
            mask: What is kept.
            order: Group name → the unit in each slot; ascending where not given.
            saved: Optimiser state of dropped units.
            magnitudes: What `magnitudes_of` says of the state, if that is known.
            follow: Whether vectors over the units are asked for before the next load.
        """
        self.narrow_model.load(state, mask, order, saved)
        if follow:
            self.fused.reload(magnitudes)

    def magnitudes_of(self, state: StateDict) -> Tensor:
        """Σ |θ| per unit of a dense state: float (J,)."""
        return self.fused.magnitudes_of(state)

    def compact(self) -> nn.Module:
        """The sparse model as a plain, smaller module; a copy."""
        return guard_pretrained(self.narrow_model.compact(), cut=not all(bool(keep.all()) for keep in self.mask.values()))

    def dense_state(self) -> dict[str, Tensor]:
        """The dense state as a new dict."""
        return self.narrow_model.dense_state()

    def apply_to_tensors(self, function: Callable[[Tensor], Tensor]) -> None:
        """Move tensors that are not parameters or buffers of `module`."""
        self.narrow_model.apply_to_tensors(function)
        if self._fused is not None:
            self._fused.apply_to_tensors(function)
        self._dense, self._wide, self._widenings_of = None, {}, -1  # they may hold buffers that are not in the state
