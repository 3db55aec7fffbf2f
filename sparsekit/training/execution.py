"""Two ways to run a model under a unit mask: physically narrow, or dense with gates (the reference).

Both define the same function, gradients and training: while a unit is dropped, its entries, their optimiser state and
their norm statistics do not change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from sparsekit.criteria.magnitudes import unit_magnitudes
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import UnitSlice
from sparsekit.graph.index import along, cut_axes, gather, wide
from sparsekit.graph.mask import UnitMask, to_weights
from sparsekit.graph.state import StateDict
from sparsekit.surgery.compaction import compact
from sparsekit.surgery.optimizer_state import OptimizerState, copies_of_weights, first_value, state_of_shape
from sparsekit.surgery.pretrained import guard_pretrained
from sparsekit.surgery.rebuild import copy_with, named_entries
from sparsekit.surgery.state_kinds import check_movable, mixes_units
from sparsekit.training.dense_model import DenseModel, straight_through_gates
from sparsekit.training.narrow_model import NarrowModel
from sparsekit.training.unit_vectors import Reader, UnitVectors

__all__ = ["Collect", "CompactExecution", "Execution", "MaskedExecution"]

Collect: TypeAlias = Callable[[str, Tensor], None]
"""Takes a state-dict key and the gradient of its entry."""


class Execution(Protocol):
    """How a learnable mask runs its model."""

    module: nn.Module

    @property
    def mask(self) -> UnitMask:
        """What is kept."""
        ...

    def call(self, scores: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], *, explore: float) -> Any:
        """Run the sparse model.

        The gradient of each kept unit's gate reaches `scores`, float (J,); those of dropped units too, times
        `explore`, at the price of a dense pass, unless that is 0.
        """
        ...

    def explore(self, scores: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], wide: UnitMask, collect: Collect) -> Any:
        """Run the sparse model with the units of `wide` behind gates of 0: the outputs are the same.

        The gradient of each kept unit's gate reaches `scores`. `collect` gets the gradient of every gated entry, dense and
        before its gates; it is right at the entries that read units of `wide`.
        """
        ...

    def stored(self, name: str) -> Tensor:
        """The dense entry under a key, not to be written to; right where dropped units are read."""
        ...

    def enter(self, units: Mapping[str, Tensor], afresh: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> None:
        """Let kept `units` begin: their optimiser state starts anew, and nothing reads those `afresh` yet.

        Args:
            units: Group name → int64 (n,).
            afresh: Group name → those whose outgoing weights become zero.
            optimizers: Hold the state.
        """
        ...

    def magnitudes(self) -> Tensor:
        """Σ |θ| per unit: float (J,), no gradient."""
        ...

    def remask(self, mask: UnitMask, optimizers: Sequence[Optimizer]) -> None:
        """Change the mask."""
        ...

    def slot_order(self) -> dict[str, Tensor]:
        """Group name → the units in the order in which narrow entries hold them; empty where entries are dense."""
        ...

    def saved_state(self) -> OptimizerState:
        """Optimiser state of dropped units that the optimisers do not hold: state-dict key → name → dense tensor."""
        ...

    def claim_saved(self, optimizer: Optimizer) -> None:
        """Let a restored optimiser take over the saved state that was loaded or copied."""
        ...

    def load(
        self,
        state: StateDict,
        mask: UnitMask,
        order: Mapping[str, Tensor] | None,
        optimizers: Sequence[Optimizer],
        saved: OptimizerState | None = None,
    ) -> None:
        """Start from a dense state under a mask; narrow entries and optimiser state take the given order of units."""
        ...

    def compact(self) -> nn.Module:
        """The sparse model as a plain, smaller module; a copy."""
        ...

    def dense_state(self) -> dict[str, Tensor]:
        """The dense state as a new dict."""
        ...

    def before_step(self, optimizers: Sequence[Optimizer]) -> None:
        """Before an optimiser changes the parameters."""
        ...

    def after_step(self, optimizers: Sequence[Optimizer]) -> None:
        """After an optimiser changed the parameters."""
        ...

    def apply_to_tensors(self, function: Callable[[Tensor], Tensor]) -> None:
        """Move tensors that are not parameters or buffers of `module`."""
        ...


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


def _gated_and_watched(graph: UnitGraph, state: StateDict, gates: Mapping[str, Tensor], collect: Collect) -> dict[str, Tensor]:
    """Gate the entries of a state, and let `collect` have the gradients of those that some gate multiplies."""
    gated = graph.gate(state, gates)
    for name, value in gated.items():
        if value is not state[name] and value.requires_grad:
            value.register_hook(functools.partial(_pass_on, collect, name))
    return gated


def _pass_on(collect: Collect, name: str, gradient: Tensor) -> None:
    collect(name, gradient)


class CompactExecution:
    """Run the narrow module of a `NarrowModel`: fast, the default.

    Args:
        model: Copied.
        graph: Its units.
        narrow_model: Runs this one in place of a copy of `model`.
    """

    def __init__(self, model: nn.Module, graph: UnitGraph, narrow_model: NarrowModel | None = None) -> None:
        self.graph = graph
        self._dense: DenseModel | None = None
        self._wide: dict[tuple[int, ...], DenseModel] = {}
        self.narrow_model = NarrowModel(model, graph) if narrow_model is None else narrow_model
        self.fused = UnitVectors(self.narrow_model)
        self.module = self.narrow_model.module

    @property
    def mask(self) -> UnitMask:
        return self.narrow_model.mask

    def call(self, scores: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], *, explore: float) -> Any:
        if not (torch.is_grad_enabled() and scores.requires_grad):
            return self.module(*args, **kwargs)
        if explore:
            return self._call_dense(scores, args, kwargs, explore)
        apply: Any = _GateGradient.apply
        gated = {name: apply(leaf, scores, readers, units) for name, leaf, readers, units in self.fused.gated_leaves()}
        return functional_call(self.module, gated, args, kwargs)

    def _call_dense(self, scores: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], explore: float) -> Any:
        """The same function on the dense model, where dropped units have a gradient too."""
        if self._dense is None:
            self._dense = DenseModel(self.module, self.graph)
        state = self.narrow_model.dense_tensors()
        gated = self.graph.gate(state, straight_through_gates(self.graph, self.mask, scores, explore))
        result = self._dense.call(gated, self.mask, self.module, args, kwargs)
        with torch.no_grad():
            self.narrow_model.store_buffers(gated)
        return result

    def explore(self, scores: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], wide: UnitMask, collect: Collect) -> Any:
        sizes = tuple(wide.counts().values())
        if sizes not in self._wide:
            self._wide[sizes] = DenseModel(self.module, self.graph, wide)
        state = self.narrow_model.dense_tensors()
        gated = _gated_and_watched(self.graph, state, straight_through_gates(self.graph, self.mask, scores, 0.0), collect)
        axes = self.graph.kept_indices(wide)
        # Entries without units are passed through; buffers are written to by the pass, and no one else's.
        state = {name: gather(value, cut_axes(value.shape, axes.get(name, {}))) for name, value in gated.items()}
        result = self._wide[sizes].call(state, self.mask, self.module, args, kwargs, within=wide)
        with torch.no_grad():
            self.narrow_model.store_wide_buffers(state, wide)
        return result

    def stored(self, name: str) -> Tensor:
        return self.narrow_model.dense_view()[self.narrow_model.key_of(name)]

    def enter(self, units: Mapping[str, Tensor], afresh: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> None:
        self.narrow_model.enter(units, afresh, optimizers)

    def magnitudes(self) -> Tensor:
        return self.fused.magnitudes()

    def remask(self, mask: UnitMask, optimizers: Sequence[Optimizer]) -> None:
        self.fused.remask(mask, optimizers)

    def slot_order(self) -> dict[str, Tensor]:
        return self.narrow_model.slot_order()

    def saved_state(self) -> OptimizerState:
        return self.narrow_model.saved_state()

    def claim_saved(self, optimizer: Optimizer) -> None:
        self.narrow_model.claim_saved(optimizer)

    def load(
        self,
        state: StateDict,
        mask: UnitMask,
        order: Mapping[str, Tensor] | None,
        optimizers: Sequence[Optimizer],
        saved: OptimizerState | None = None,
    ) -> None:
        order = self._ascending(mask) if order is None else order
        self.narrow_model.remask(mask, optimizers, order)
        self.narrow_model.load(state, mask, order, saved)
        self.fused.reload()

    def _ascending(self, mask: UnitMask) -> dict[str, Tensor]:
        return {name: keep.cpu().nonzero().reshape(-1) for name, keep in mask.items()}

    def compact(self) -> nn.Module:
        return guard_pretrained(self.narrow_model.compact(), cut=not all(bool(keep.all()) for keep in self.mask.values()))

    def dense_state(self) -> dict[str, Tensor]:
        return self.narrow_model.dense_state()

    def before_step(self, optimizers: Sequence[Optimizer]) -> None:
        """Nothing: dropped entries are not there."""

    def after_step(self, optimizers: Sequence[Optimizer]) -> None:
        """Nothing: dropped entries are not there."""

    def apply_to_tensors(self, function: Callable[[Tensor], Tensor]) -> None:
        self.narrow_model.apply_to_tensors(function)
        self.fused.apply_to_tensors(function)
        self._dense, self._wide = None, {}  # they may hold buffers that are not in the state


class MaskedExecution:
    """Run the dense module with gated entries. It saves no time; it is the reference for compact execution."""

    def __init__(self, model: nn.Module, graph: UnitGraph) -> None:
        self.graph = graph
        self.module = copy_with(model, {})
        self.mask = UnitMask.full(graph)
        self._dense = DenseModel(self.module, graph)
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}

    def _dropped_by_name(self, names: Iterable[str], mask: UnitMask | None = None) -> Iterator[tuple[str, Tensor]]:
        """(name, bool of its dropped entries) for those of `names` that units touch, under the mask or another."""
        kept = to_weights(self.graph, self.mask if mask is None else mask)
        device = next(self.module.parameters()).device
        for name in names:
            if name in kept:
                yield name, ~kept[name].to(device)

    def call(self, scores: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], *, explore: float) -> Any:
        gates = straight_through_gates(self.graph, self.mask, scores, explore)
        gated = self.graph.gate(dict(self.module.named_parameters(remove_duplicate=False)), gates)
        return self._call(gated, args, kwargs, self.mask)

    def explore(self, scores: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], wide: UnitMask, collect: Collect) -> Any:
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        gates = straight_through_gates(self.graph, self.mask, scores, 0.0)
        return self._call(_gated_and_watched(self.graph, parameters, gates, collect), args, kwargs, wide)

    def _call(self, gated: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], updated: UnitMask) -> Any:
        """Run the dense module; statistics of the units in `updated` are renewed."""
        # The forward pass writes statistics into copies, since autograd may need what it wrote, unchanged.
        buffers = {name: tensor for name, tensor in named_entries(self.module).items() if name not in gated}
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        result = self._dense.call({**gated, **copies}, self.mask, self.module, args, kwargs)
        dropped = dict(self._dropped_by_name(copies, updated))
        for name, buffer in buffers.items():
            buffer.copy_(torch.where(dropped[name], buffer, copies[name]) if name in dropped else copies[name])
        return result

    def stored(self, name: str) -> Tensor:
        return named_entries(self.module)[name].detach()

    def enter(self, units: Mapping[str, Tensor], afresh: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> None:
        parameters = dict(self.module.named_parameters())
        copies = {optimizer: copies_of_weights(optimizer, list(parameters.values())) for optimizer in optimizers}
        dropped = dict(self._dropped_by_name(parameters))
        for name in dropped:
            parameter = parameters[name].detach()
            for group, piece in self.graph.slices_of[name]:
                if piece.gated and group in afresh:
                    parameter[self._at(piece, afresh[group], ~dropped[name])] = 0.0
        for name in dropped:
            parameter = parameters[name]
            for group, piece in self.graph.slices_of[name]:
                if group in units:
                    at = self._at(piece, units[group], ~dropped[name])
                    for optimizer in optimizers:
                        for state_name, value in state_of_shape(optimizer, parameter):
                            weights = state_name in copies[optimizer]
                            value[at] = parameter.detach()[at] if weights else first_value(optimizer, state_name)

    def _at(self, piece: UnitSlice, units: Tensor, kept: Tensor) -> Tensor:
        """bool, of the shape of `kept`: the kept entries of `units`."""
        chosen = torch.zeros(kept.shape[piece.dim], dtype=torch.bool, device=kept.device)
        chosen[piece.index[units].reshape(-1).to(kept.device)] = True
        return kept & along(chosen, piece.dim, kept.dim())

    def magnitudes(self) -> Tensor:
        weights = {name: parameter.detach() for name, parameter in self.module.named_parameters()}
        return torch.cat([unit_magnitudes(group, weights) for group in self.graph.groups.values()])

    def remask(self, mask: UnitMask, optimizers: Sequence[Optimizer]) -> None:  # noqa: ARG002 - state needs no moving
        mask.check(self.graph)
        self.mask = mask
        for parameter in self.module.parameters():
            parameter.grad = None

    def slot_order(self) -> dict[str, Tensor]:
        return {}

    def saved_state(self) -> OptimizerState:
        return {}

    def claim_saved(self, optimizer: Optimizer) -> None:
        """Nothing: an optimiser holds the state of all units."""

    def load(
        self,
        state: StateDict,
        mask: UnitMask,
        order: Mapping[str, Tensor] | None,  # noqa: ARG002 - dense entries have one order
        optimizers: Sequence[Optimizer],  # noqa: ARG002 - state needs no moving
        saved: OptimizerState | None = None,  # noqa: ARG002 - optimisers hold the state of all units
    ) -> None:
        self.graph.check_state(state)
        mask.check(self.graph)
        self.module.load_state_dict(dict(state))
        self.mask = mask

    def compact(self) -> nn.Module:
        return compact(self.module, self.graph, self.mask)

    def dense_state(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in named_entries(self.module).items()}

    def _standing(self, optimizers: Sequence[Optimizer]) -> Iterator[tuple[Tensor, Tensor, Tensor | float]]:
        """(tensor, bool of its dropped entries, their first values): parameters, and optimiser state of their shape."""
        parameters = dict(self.module.named_parameters())
        copies = {optimizer: copies_of_weights(optimizer, list(parameters.values())) for optimizer in optimizers}
        for name, dropped in self._dropped_by_name(parameters):
            parameter = parameters[name]
            yield parameter.detach(), dropped, 0.0
            for optimizer in optimizers:
                for state_name, value in state_of_shape(optimizer, parameter):
                    weights = state_name in copies[optimizer]
                    yield value, dropped, parameter.detach()[dropped] if weights else first_value(optimizer, state_name)

    def before_step(self, optimizers: Sequence[Optimizer]) -> None:
        """Save the values of all entries: a step may call the model and so change which are dropped.

        Raises:
            InvalidValueError: an optimiser that steps a dense copy otherwise than a narrow model.
        """
        for optimizer in optimizers:
            if mixes_units(optimizer):
                raise InvalidValueError(
                    f"{type(optimizer).__name__} steps an entry by what the others of its matrix are, so masked execution,"
                    " where dropped ones are zeros, would train otherwise than the narrow model; use execution='compact'"
                )
        # Each tensor is held, so that no tensor that the step makes can take its place in memory.
        self._saved = {tensor.data_ptr(): (tensor, tensor.clone()) for tensor, _, _ in self._standing(optimizers)}

    def after_step(self, optimizers: Sequence[Optimizer]) -> None:
        """Restore the values of dropped entries; state that the step has just created gets its first value there.

        Raises:
            InvalidValueError: an optimiser whose state is quantised in blocks, dropped entries among them.
        """
        check_movable(optimizers, list(self.module.parameters()))
        for tensor, dropped, first in self._standing(optimizers):
            _, values = self._saved.get(tensor.data_ptr(), (None, None))
            tensor[dropped] = first if values is None else values[dropped]
        # The values are kept: this may have been the step of an optimiser within that of another one, which ends here too.

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what the last step saved."""
        return {**vars(self), "_saved": {}}

    def apply_to_tensors(self, function: Callable[[Tensor], Tensor]) -> None:
        """Make the dense copy anew: it may hold tensors outside its state; all others are the module's own."""
        del function
        self._dense = DenseModel(self.module, self.graph)
