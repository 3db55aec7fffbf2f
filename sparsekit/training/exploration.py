"""Exploring passes: the narrow model with the dropped units of some groups behind gates of 0, where they have gradients.

The outputs are those of the narrow model. Entries that the widened groups do not touch are the narrow leaves themselves; of the
others, what the dropped units hold is gathered from the dense copy for one pass.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsekit._torch import buffers_of, eager, parameters_of, reset_flat_weights
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import Axes, StateDict, cut_axes, gather, narrow_shape, places, scatter_, wide
from sparsekit.graph.mask import UnitMask
from sparsekit.surgery.kept_norms import KeptNorms
from sparsekit.surgery.rebuild import copy_with, named_entries
from sparsekit.training.narrow_model import NarrowModel, Rules, fit_sizes


class DenseModel:
    """The model at the sizes of the mask `wide`, as a function of its state; masks of a call are within masks of these sizes.

    The state of a call stays in place until the next call, so that checkpointed parts, which run again in the backward
    pass, see the same gated entries. `torch.func.functional_call` restores the module's own state too early for that.
    """

    def __init__(
        self,
        module: nn.Module,
        graph: UnitGraph,
        wide: UnitMask,
        sizes: Mapping[str, Mapping[str, int]] | None = None,
        rules: Rules | None = None,
    ) -> None:
        entries, axes = named_entries(module), graph.kept_indices(wide)
        # Without memory for its state, which each call brings.
        empty = {
            name: torch.empty(narrow_shape(shape, axes.get(name, {})), device="meta", dtype=entries[name].dtype)
            for name, shape in graph.shapes.items()
        }
        self._module = copy_with(module, empty)
        fit_sizes(self._module, sizes or {}, graph, wide.counts(), rules)
        self._norms = KeptNorms(self._module, graph)
        self._recurrent = [part for part in self._module.modules() if isinstance(part, nn.RNNBase)]
        self._places: dict[str, tuple[nn.Module, str]] = {}
        modules = dict(self._module.named_modules(remove_duplicate=False))
        for name in graph.shapes:
            owner_name, _, attribute = name.rpartition(".")
            self._places[name] = modules[owner_name], attribute
        for owner, attribute in self._places.values():
            parameters_of(owner).pop(attribute, None)
            buffers_of(owner).pop(attribute, None)

    def release(self) -> None:
        """Let go of the state of the last call, after its backward pass."""
        for owner, attribute in self._places.values():
            owner.__dict__.pop(attribute, None)
        self._sync_recurrent()

    def __getstate__(self) -> dict[str, Any]:
        self.release()
        return vars(self)

    def _sync_recurrent(self) -> None:
        """Renew the list of weights that every recurrent layer keeps."""
        for module in self._recurrent:
            reset_flat_weights(module)

    def call(
        self,
        state: StateDict,
        mask: UnitMask,
        like: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        within: UnitMask | None = None,
    ) -> Any:
        """Run the model on a dense or wide, gated state, whose buffers are written to, as in any forward pass.

        Args:
            state: State-dict key → tensor.
            mask: What is kept, for norms that leave out the rest.
            like: A module of the same structure; its training modes are used.
            args, kwargs: The inputs.
            within: The units that a wide state has, of the sizes of `wide`.
        """
        for own, other in zip(self._module.modules(), like.modules(), strict=True):
            own.training = other.training
        for name, (owner, attribute) in self._places.items():
            owner.__dict__[attribute] = state[name]
        self._sync_recurrent()
        self._norms.set_mask(mask, within, device=next(iter(state.values())).device)
        # A compiled module is compiled for its narrow sizes; a rare dense pass is not worth another compilation.
        with eager():
            return self._module(*args, **kwargs)


class Reading(NamedTuple):
    """The gradient of an entry that reads units of a group, by an index table of its own."""

    group: str
    dim: int
    table: Tensor
    """int64 (units, span): the positions of each unit along `dim`."""
    gradient: Tensor
    """Of the wide entry, in which dropped units are read by zeros."""


class _Watched(NamedTuple):
    leaf: nn.Parameter
    at: Axes
    """Position of the leaf in the wide entry."""
    pieces: Mapping[str, tuple[str, int, Tensor]]
    """Name of a reading → (group, axis, positions of each unit)."""


class Readings:
    """The gradients of the wide entries of all passes of one step, summed as torch sums those of the leaves."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}
        self._sums: dict[str, Tensor] = {}

    def watch(
        self, name: str, entry: Tensor, leaf: nn.Parameter, at: Axes, pieces: Mapping[str, tuple[str, int, Tensor]]
    ) -> None:
        """Sum the gradients of `entry`, in which `leaf` is at the positions `at`, from its next backward passes on."""
        self._watched[name] = _Watched(leaf, at, pieces)
        entry.register_hook(partial(self._add, name))

    def _add(self, name: str, gradient: Tensor) -> None:
        before = self._watched[name].leaf.grad
        # A leaf without a gradient begins a step: what came before was of a step that was skipped, as after an overflow.
        begins = name not in self._sums or before is None or not bool(before.any())
        self._sums[name] = wide(gradient) if begins else self._sums[name] + wide(gradient)

    def read(self, gradients: Mapping[Tensor, Tensor], *, distributed: bool) -> dict[str, Reading]:
        """Return the readings of the step: name → reading.

        They are scaled as `gradients`, leaf → gradient as the optimiser has it: clipped, averaged over ranks, without the
        scale of a GradScaler. `distributed`: other ranks train the same mask.
        """
        sums, watched = dict(sorted(self._sums.items())), self._watched
        product = square = 0.0
        for name, gradient in sums.items():
            if distributed and torch.distributed.is_initialized():
                sums[name] = gradient.clone()
                torch.distributed.all_reduce(sums[name])
            leaf = wide(gradients[watched[name].leaf])
            raw = torch.where(leaf != 0.0, gather(sums[name], watched[name].at), 0.0)
            product, square = product + float((raw * leaf).sum()), square + float(raw.square().sum())
        if not math.isfinite(square):
            return {}
        scale = product / square if square else 1.0
        return {
            key: Reading(group, dim, table, sums[name] * scale)
            for name in sums
            for key, (group, dim, table) in watched[name].pieces.items()
        }


class _Entry(NamedTuple):
    axes: Axes
    """Position of the wide entry in the dense one."""
    at: Axes
    """Position of the narrow entry in the wide one."""
    dropped: list[tuple[int, Tensor]]
    """Axis and positions along it at which dropped units are read."""
    pieces: dict[str, tuple[str, int, Tensor]]
    """As in `Readings.watch`."""


def widened(mask: UnitMask, groups: Sequence[str]) -> UnitMask:
    """Return the mask with all units of `groups`."""
    return UnitMask({**mask, **{name: torch.ones_like(mask[name]) for name in groups}})


class _Widening:
    """Positions of the narrow entries in those of a model that has all units of `groups` too; true until the mask changes."""

    def __init__(self, narrow_model: NarrowModel, groups: Sequence[str]) -> None:
        self._narrow_model = narrow_model
        graph = narrow_model.graph
        self.mask = widened(narrow_model.mask, groups)
        positions = graph.kept_indices(self.mask)
        self._entries: dict[str, _Entry] = {}
        for key, _, tensor in narrow_model.tensors():
            pieces, shape = graph.slices_of.get(key, ()), graph.shapes[key]
            if not any(group in groups for group, _ in pieces):
                continue
            device = tensor.device
            wide_at = {dim: places(own, shape[dim]) for dim, own in positions[key].items()}
            at = {
                dim: wide_at[dim][own].to(device)
                for dim, own in narrow_model.positions(key).items()
                if own.numel() != positions[key][dim].numel()
            }
            axes = {dim: index.to(device) for dim, index in cut_axes(shape, positions[key]).items()}
            entry = self._entries[key] = _Entry(axes, at, [], {})
            for group, piece in pieces:
                if group in groups and piece.gated:
                    table = wide_at[piece.dim][piece.index]
                    entry.dropped.append((piece.dim, table[~narrow_model.mask[group]].reshape(-1).to(device)))
                    number = next(i for i, other in enumerate(graph.groups[group].slices) if other is piece)
                    entry.pieces[f"{group}.{number}"] = group, piece.dim, table.to(device)

    def call(self, model: DenseModel, args: Sequence[Any], kwargs: Mapping[str, Any], readings: Readings) -> Any:
        """Run `model`, which has the sizes of `mask`."""
        narrow_model = self._narrow_model
        state: dict[str, Tensor] = {}
        statistics = []
        for key, names, tensor in narrow_model.tensors():
            entry = self._entries.get(key)
            value = tensor
            if entry is not None:
                value = gather(narrow_model.dense_view()[key], entry.axes)
                value = value if entry.axes else value.clone()
                for dim, dropped in entry.dropped:
                    value.index_fill_(dim, dropped, 0.0)
                value = scatter_(tensor, value, entry.at)
                if not isinstance(tensor, nn.Parameter):
                    statistics.append((key, tensor, value, entry))
                elif entry.pieces and value.requires_grad:
                    readings.watch(key, value, tensor, entry.at, entry.pieces)
            state.update(dict.fromkeys(names, value))
        result = model.call(state, narrow_model.mask, narrow_model.module, args, kwargs, within=self.mask)
        with torch.no_grad():  # statistics of dropped units are renewed as well, so that they are right when those enter
            for key, tensor, value, entry in statistics:
                scatter_(value, narrow_model.writable(key), entry.axes)
                tensor.copy_(gather(value, entry.at))
        return result


class WidePasses:
    """Passes of the narrow model that see dropped units too, each on a model of its widths that is made when first needed."""

    def __init__(self, narrow_model: NarrowModel) -> None:
        self._narrow_model = narrow_model
        self._models: dict[tuple[str, ...], tuple[tuple[int, ...], DenseModel]] = {}
        self._widenings: dict[tuple[str, ...], _Widening] = {}
        self._version = -1

    def call(self, groups: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], readings: Readings) -> Any:
        """Run the sparse model with the dropped units of `groups` behind gates of 0; the outputs are the same as without.

        The gradients of the entries that read units of the groups go to `readings`.
        """
        narrow = self._narrow_model
        if self._version != narrow.version:
            self._widenings, self._version = {}, narrow.version
        if groups not in self._widenings:
            widening = self._widenings[groups] = _Widening(narrow, groups)
            sizes = tuple(widening.mask.counts().values())
            if groups not in self._models or self._models[groups][0] != sizes:
                model = DenseModel(narrow.module, narrow.graph, widening.mask, narrow.sizes, narrow.rules)
                self._models[groups] = sizes, model
        return self._widenings[groups].call(self._models[groups][1], args, kwargs, readings)

    def release(self) -> None:
        """Let go of what the last passes ran on, after their step."""
        for _, model in self._models.values():
            model.release()

    def clear(self) -> None:
        """Let go of all models."""
        self._models, self._version = {}, -1
