"""DenseModel, Widening: the narrow model with the dropped units of some groups behind gates of 0, where they have gradients.

The outputs are those of the narrow model. Entries that the widened groups do not touch are the narrow leaves themselves; of the
others, what the dropped units hold is gathered from the dense copy for one pass.
"""

import math
from collections.abc import Mapping, Sequence
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


def skeleton(
    module: nn.Module,
    graph: UnitGraph,
    wide: UnitMask,
    sizes: Mapping[str, Mapping[str, int]] | None = None,
    rules: Rules | None = None,
) -> nn.Module:
    """Copy a narrow module with the sizes under the mask `wide`, but without memory for its state, which each call must bring.

    `sizes` and `rules` are those of the `NarrowModel`, unless the module is dense itself. Tensors outside the state (a buffer
    that is not saved, a tensor in an attribute) are copied.
    """
    entries = named_entries(module)
    axes = graph.kept_indices(wide)
    shapes = {name: narrow_shape(shape, axes.get(name, {})) for name, shape in graph.shapes.items()}
    empty = {name: torch.empty(shape, device="meta", dtype=entries[name].dtype) for name, shape in shapes.items()}
    found = copy_with(module, empty)
    fit_sizes(found, sizes or {}, graph, wide.counts(), rules)
    return found


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
        self._module = skeleton(module, graph, wide, sizes, rules)
        self._norms = KeptNorms(self._module, graph)
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
        for module in self._module.modules():
            if isinstance(module, nn.RNNBase):
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


class Probe(NamedTuple):
    """An entry that reads the units of a widened group, as one pass had it; `entry.grad` is its gradient after `backward()`."""

    key: str
    """Names group and slice."""
    group: str
    dim: int
    table: Tensor
    """int64 (units, span): the positions of each unit along `dim`."""
    entry: Tensor
    """The wide entry; 0 where dropped units are read."""
    leaf: nn.Parameter
    at: Axes
    """Position of the leaf in the wide entry."""


class Reading(NamedTuple):
    """The gradient of an entry that reads the units of a group, by an index table of its own."""

    group: str
    dim: int
    table: Tensor
    gradient: Tensor


class _Entry(NamedTuple):
    axes: Axes
    """Position of the wide entry in the dense one."""
    at: Axes
    """Position of the narrow entry in the wide one."""
    probes: list[tuple[str, str, int, Tensor, Tensor]]
    """(key, group, axis, positions of each unit, those of dropped units)."""


_ROUNDING = 1e-3
"""Share by which two alignments differ by rounding alone."""


def widened(mask: UnitMask, groups: Sequence[str]) -> UnitMask:
    """Return the mask with all units of `groups`."""
    return UnitMask({**mask, **{name: torch.ones_like(mask[name]) for name in groups}})


class Widening:
    """Positions of the narrow entries in those of a model that has all units of `groups` too; true until the mask changes."""

    def __init__(self, narrow_model: NarrowModel, groups: Sequence[str]) -> None:
        self._narrow_model = narrow_model
        graph = narrow_model.graph
        self.mask = widened(narrow_model.mask, groups)
        positions = graph.kept_indices(self.mask)
        self._entries: dict[str, _Entry] = {}
        for key, _, _ in narrow_model.tensors():
            pieces, shape = graph.slices_of.get(key, ()), graph.shapes[key]
            if not any(group in groups for group, _ in pieces):
                continue
            narrow = narrow_model.positions(key)
            wide_at = {dim: places(own, shape[dim]) for dim, own in positions[key].items()}
            at = {dim: wide_at[dim][own] for dim, own in narrow.items() if own.numel() != positions[key][dim].numel()}
            entry = _Entry(cut_axes(shape, positions[key]), at, [])
            for group, piece in pieces:
                if group in groups and piece.gated:
                    table = wide_at[piece.dim][piece.index]
                    dropped = table[~narrow_model.mask[group]].reshape(-1)
                    number = next(i for i, other in enumerate(graph.groups[group].slices) if other is piece)
                    entry.probes.append((f"{group}.{number}", group, piece.dim, table, dropped))
            self._entries[key] = entry

    def call(self, model: DenseModel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, list[Probe]]:
        """Run `model`, which has the sizes of `mask`: the outputs, and the entries that read the units of the groups."""
        narrow_model = self._narrow_model
        state: dict[str, Tensor] = {}
        probes: list[Probe] = []
        for key, names, tensor in narrow_model.tensors():
            entry = self._entries.get(key)
            value = tensor
            if entry is not None:
                value = gather(narrow_model.dense_view()[key], entry.axes)
                value = value if entry.axes else value.clone()
                for *_, dim, _, dropped in entry.probes:
                    value.index_fill_(dim, dropped.to(value.device), 0.0)
                value = scatter_(tensor, value, entry.at)
                if isinstance(tensor, nn.Parameter) and value.requires_grad:
                    value.retain_grad()
                    probes += [Probe(*probe[:4], value, tensor, entry.at) for probe in entry.probes]
            state.update(dict.fromkeys(names, value))
        result = model.call(state, narrow_model.mask, narrow_model.module, args, kwargs, within=self.mask)
        with torch.no_grad():  # statistics of dropped units are renewed as well, so that they are right when those enter
            for key, names, tensor in narrow_model.tensors():
                if key in self._entries and not isinstance(tensor, nn.Parameter):
                    value, entry = state[names[0]], self._entries[key]
                    scatter_(value, narrow_model.writable(key), entry.axes)
                    tensor.copy_(gather(value, entry.at))
        return result, probes


class WidePasses:
    """Passes of the narrow model that see dropped units too, each on a model of its widths that is made when first needed."""

    def __init__(self, narrow_model: NarrowModel) -> None:
        self._narrow_model = narrow_model
        self._models: dict[tuple[str, ...], tuple[tuple[int, ...], DenseModel]] = {}
        self._widenings: dict[tuple[str, ...], Widening] = {}
        self._version = -1

    def call(self, groups: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Probe]]:
        """Run the sparse model with the dropped units of `groups` behind gates of 0.

        Returns:
            The outputs, the same as without them, and the entries that read units of the groups.
        """
        narrow, groups = self._narrow_model, tuple(groups)
        if self._version != narrow.version:
            self._widenings, self._version = {}, narrow.version
        if groups not in self._widenings:
            self._widenings[groups] = Widening(narrow, groups)
        widening = self._widenings[groups]
        sizes = tuple(widening.mask.counts().values())
        if groups not in self._models or self._models[groups][0] != sizes:
            model = DenseModel(narrow.module, narrow.graph, widening.mask, narrow.sizes, narrow.rules)
            self._models[groups] = sizes, model
        return widening.call(self._models[groups][1], args, kwargs)

    def release(self) -> None:
        """Let go of what the last passes ran on, after their step."""
        for _, model in self._models.values():
            model.release()

    def clear(self) -> None:
        """Let go of all models."""
        self._models, self._version = {}, -1


def read(passes: Sequence[Sequence[Probe]], gradients: Mapping[Tensor, Tensor], *, distributed: bool) -> dict[str, Reading]:
    """Return the gradients of the entries that the exploring passes of one step probed: key → reading.

    The readings are scaled as `gradients`, leaf → gradient as the optimiser has it: clipped, averaged over ranks, without the
    scale of a GradScaler. `distributed`: other ranks train the same mask.

    If the step before was skipped, as a GradScaler does after an overflow, its passes are among `passes` and its gradients are
    not in `gradients`. So only the latest passes count: as many as together point where the gradients do, best.
    """
    sums: dict[str, Tensor] = {}
    probe_of: dict[str, Probe] = {}
    best: dict[str, Tensor] = {}
    closest = scale = 0.0
    for own in reversed(passes):
        for probe in own:
            if probe.entry.grad is not None and probe.leaf in gradients:
                gradient = wide(probe.entry.grad)
                sums[probe.key] = sums[probe.key] + gradient if probe.key in sums else gradient
                probe_of.setdefault(probe.key, probe)
        found = dict(sorted(sums.items()))
        if distributed and torch.distributed.is_initialized():
            found = {key: gradient.clone() for key, gradient in found.items()}
            for gradient in found.values():
                torch.distributed.all_reduce(gradient)
        product = square = 0.0
        for key, gradient in found.items():
            leaf = wide(gradients[probe_of[key].leaf])
            raw = torch.where(leaf != 0.0, gather(gradient, probe_of[key].at), 0.0)
            product, square = product + float((raw * leaf).sum()), square + float(raw.square().sum())
        if not math.isfinite(square):
            break
        alignment = product / math.sqrt(square) if square else 0.0
        if not best or alignment >= closest * (1.0 - _ROUNDING):  # of equals the one of most passes
            best, closest, scale = found, alignment, product / square if square else 1.0
    return {
        key: Reading(probe_of[key].group, probe_of[key].dim, probe_of[key].table.to(gradient.device), gradient * scale)
        for key, gradient in best.items()
    }
