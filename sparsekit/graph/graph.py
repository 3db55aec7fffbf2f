"""UnitGraph: what can be removed from a model, as data only; nothing here depends on the kind of layer."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparsekit.errors import ForeignMaskError, InvalidValueError
from sparsekit.graph.groups import (
    Block,
    Constant,
    FreeLength,
    Leftover,
    NormSite,
    SizeAttribute,
    UnitGroup,
    UnitSlice,
    Unprunable,
    group_order,
)
from sparsekit.graph.held import Path
from sparsekit.graph.index import StateDict, gate, narrow_shape

_SHOWN = 6
_REMEMBERED = 8
_LOCK = threading.Lock()


@dataclass(frozen=True, eq=False)
class UnitGraph:
    """Describes as plain data which units a model has, and which tensor slices each unit occupies.

    `trace_units` returns one. Masks, cuts, costs and uploads are all computed from it, without the model's code.

    Args:
        groups: Group name → group, in forward order.
        shapes: State-dict key → shape, for all entries of the state.
        ties: Sets of groups that must keep equally many units, such as the layers of a stacked LSTM.
        unprunable: Units that cannot be removed exactly, with the reasons.
        sizes: Integers in modules that depend on the number of kept units.
        norms: Normalization calls that average over the kept units only; empty unless `prune_hidden_size=True`.
        aliases: State-dict keys that share one tensor, such as tied weights.
        constants: Name → tensor outside the state that holds units, and is cut with them.
        free: Lengths in calls of `reshape` that are -1 in a narrow model.
        leftovers: Attributes in which a pass stores tensors, and that are cleared in a narrow model.
        unfollowed: Integers of modules, such as "block.in_chs", that stay as in the dense model although they equal a width:
            `forward` does not read them, and they equal two widths that differ after a cut. Other methods may read them.
        blocks: Name of a module → the residual branch that can be removed whole with it. Found by `prune` if it may remove
            blocks, and by `sparsekit units`.
    """

    groups: Mapping[str, UnitGroup]
    shapes: Mapping[str, torch.Size]
    ties: tuple[tuple[str, ...], ...] = ()
    unprunable: tuple[Unprunable, ...] = ()
    sizes: tuple[SizeAttribute, ...] = ()
    norms: tuple[NormSite, ...] = ()
    aliases: tuple[tuple[str, ...], ...] = ()
    constants: Mapping[str, Constant] = field(default_factory=dict)
    free: tuple[FreeLength, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    unfollowed: tuple[str, ...] = ()
    blocks: Mapping[str, Block] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return a one-line summary. For one group, use `print(graph.groups[name])`; for all, run `sparsekit units`."""
        shown = [f"{group.name}: {group.size} {group.kind}s" for group in list(self.groups.values())[:_SHOWN]]
        more = len(self.groups) - len(shown)
        listed = ", ".join([*shown, f"and {more} more"] if more else shown)
        entries = sum(map(math.prod, self.tensors.values()))
        whole = f"; {len(self.unprunable)} cannot be pruned" if self.unprunable else ""
        groups = f"{len(self.groups)} group{'' if len(self.groups) == 1 else 's'}"
        return f"UnitGraph({self.units:,} units in {groups} over {entries:,} entries: {listed}{whole})"

    @cached_property
    def tensors(self) -> Mapping[str, torch.Size]:
        """State-dict key → shape, with each tensor once: under the first of its keys."""
        known = ([name for name in names if name in self.shapes] for names in self.aliases)
        again = {name for names in known for name in names[1:]}
        return {name: shape for name, shape in self.shapes.items() if name not in again}

    @property
    def units(self) -> int:
        """Number of units of all groups, J in the paper."""
        return sum(group.size for group in self.groups.values())

    @cached_property
    def tied_sets(self) -> tuple[tuple[str, ...], ...]:
        """All groups, in sets that keep equally many units, in forward order; most sets hold one group.

        Ties that share a group are merged: (a, b) and (b, c) become (a, b, c).
        """
        home = {name: {name} for name in self.groups}
        for tied in self.ties:
            union = set().union(*(home[name] for name in tied))
            home.update((name, union) for name in union)
        return tuple(dict.fromkeys(tuple(name for name in self.groups if name in same) for same in home.values()))

    @cached_property
    def slices_of(self) -> Mapping[str, tuple[tuple[str, UnitSlice], ...]]:
        """State-dict key → the (group name, slice) pairs that touch it; keys without units are absent."""
        found: dict[str, list[tuple[str, UnitSlice]]] = {}
        for group in self.groups.values():
            for piece in group.slices:
                found.setdefault(piece.name, []).append((group.name, piece))
        return {name: tuple(pieces) for name, pieces in found.items()}

    @cached_property
    def _table(self) -> _Table:
        return _Table.of(self)

    def numbers(self, counts: Mapping[str, int]) -> dict[tuple[str, Path], int]:
        """Return (module, path) → value of every integer in `sizes`. `counts`: group name → units kept."""
        found: dict[tuple[str, Path], int] = {}
        for size in self.sizes:
            gone = size.per_unit * (self.groups[size.group].size - counts[size.group])
            found[size.module, size.path] = found.get((size.module, size.path), size.dense) - gone
        return found

    @cached_property
    def integer_entries(self) -> Mapping[str, tuple[str, Path]]:
        """State-dict key → (module, path) of each integer in `sizes` that is a buffer of the state."""
        keys = {f"{size.module}.{size.path[0]}".lstrip("."): (size.module, size.path) for size in self.sizes}
        return {key: place for key, place in keys.items() if key in self.shapes}

    def check_counts(self, counts: Mapping[str, int]) -> None:
        """Raise InvalidValueError unless tied groups keep equally many units, and every count fits `UnitGroup.multiple`.

        `counts`: group name → units kept.
        """
        for name, group in self.groups.items():
            if counts[name] % group.multiple and counts[name] != group.size:
                raise InvalidValueError(
                    f"group {name!r} must keep all of its {group.size} units or a multiple of {group.multiple}, which its"
                    f" kernel takes, got {counts[name]}"
                )
        for tied in self.ties:
            kept = {name: counts[name] for name in tied}
            if len(set(kept.values())) > 1:
                raise InvalidValueError(f"groups {', '.join(tied)} share one size and must keep equally many units, got {kept}")

    def check_state(self, state: StateDict, mask: Mapping[str, Tensor] | None = None, *, what: str = "the state") -> None:
        """Raise ForeignMaskError unless `state` has the keys and shapes of the model that was traced; other keys are ignored.

        With a mask, group name → bool (units,), the state belongs to the compacted model. `what` names it in the message.
        """
        kept = {} if mask is None else self.kept_indices(mask)
        for name, dense in self.shapes.items():
            if name not in state:
                raise ForeignMaskError(f"{what} lacks {name!r}; pass the state of the model that the graph was traced from")
            expected, found = narrow_shape(dense, kept.get(name, {})), state[name].shape
            if found != expected:
                if mask is None:
                    hint = f"the graph expects {tuple(expected)}; a compacted state must be expanded first"
                else:
                    hint = f"the mask gives {tuple(expected)}; pass the mask that it was compacted with"
                raise ForeignMaskError(f"{what} has {name!r} of shape {tuple(found)}, {hint}")

    def gate(self, state: StateDict, gates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Multiply the gated entries of each unit by its gate. Differentiable in the state and in the gates.

        Gates of 0 and 1 are exact if the state and the values of units are finite: the gated model then computes the same as
        the compacted one. An infinite value times a gate of 0 is NaN, while the compacted model does not have that unit.
        `UnitSlice.gated` says what gates between 0 and 1 mean.

        Args:
            state: The dense state of the model.
            gates: Group name → float (units,); groups left out keep gate 1.

        Returns:
            A new dict with every key of `state`; entries without gated units are passed through.
        """
        gated = dict(state)
        for group_name, values in gates.items():
            if group_name not in self.groups:
                raise ForeignMaskError(f"no group {group_name!r} in this graph; groups: {', '.join(self.groups)}")
            group = self.groups[group_name]
            if values.shape != (group.size,):
                raise ForeignMaskError(f"gates of {group_name!r} must have shape ({group.size},), got {tuple(values.shape)}")
            for piece in group.slices:
                if piece.gated:
                    gated[piece.name] = gate(gated[piece.name], piece.dim, piece.index, values)
        return gated

    def kept_indices(self, keep: Mapping[str, Tensor]) -> dict[str, dict[int, Tensor]]:
        """Return state-dict key → axis → int64 (kept,): the positions that stay, ascending, along each axis with units.

        `keep`: group name → bool (units,), for every group. The tensors are read-only.
        """
        return {name: dict(axes) for name, axes in self._kept(keep).items() if name not in self.constants}

    def kept_constants(self, keep: Mapping[str, Tensor]) -> dict[str, dict[int, Tensor]]:
        """Return name in `constants` → axis → int64 (kept,): the positions that stay, as in `kept_indices`."""
        return {name: dict(axes) for name, axes in self._kept(keep).items() if name in self.constants}

    def _kept(self, keep: Mapping[str, Tensor]) -> dict[str, dict[int, Tensor]]:
        kept = self._fused(keep)
        key = kept.tobytes()
        found = self._recent.get(key)
        if found is None:
            found = self._table.kept(kept)
            with _LOCK:  # threads may share a graph
                while len(self._recent) >= _REMEMBERED:
                    self._recent.pop(next(iter(self._recent)))
                self._recent[key] = found
        return found

    def rotated_indices(self, keep: Mapping[str, Tensor], groups: Collection[str]) -> dict[str, dict[int, Tensor]]:
        """Return kept positions of entries and constants, with the kept units of some groups rotated by one.

        They are for verification. A model that is cut with them has unchanged outputs if the graph assigns every position to
        the right unit. A mask alone cannot show whether the positions of two kept units are swapped.
        """
        moved: list[npt.NDArray[np.int64]] = []
        for name, group in self.groups.items():
            source = np.arange(group.size)
            if name in groups:
                stay = np.flatnonzero(keep[name].cpu().numpy())
                source[stay] = np.roll(stay, 1)
            moved.append(source - np.arange(group.size))
        return self._table.kept(self._fused(keep), np.concatenate([*moved, np.zeros(0, dtype=np.int64)]))

    def _fused(self, keep: Mapping[str, Tensor]) -> npt.NDArray[np.bool_]:
        return np.concatenate([keep[name].cpu().numpy() for name in self.groups] or [np.zeros(0, dtype=bool)])

    @cached_property
    def _recent(self) -> dict[bytes, dict[str, dict[int, Tensor]]]:
        """Positions kept by the last few masks, since loading, cutting, sending and checking all use the same mask."""
        return {}

    @cached_property
    def checks(self) -> list[Callable[[nn.Module, nn.Module | None], None]]:
        """Functions of a narrow and its dense model that raise if the narrow one fails. Traces add one; they are not saved."""
        return []

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "checks"}

    def fingerprint(self) -> tuple[tuple[str, int], ...]:
        """Return names and sizes of the groups, which a mask must match."""
        return tuple((group.name, group.size) for group in self.groups.values())


@dataclass(frozen=True, eq=False)
class _Table:
    """All slices of a graph as arrays. The axes that units touch are concatenated, so that a position is one number."""

    axes: list[tuple[str, int]]  # (state-dict key, axis)
    bounds: npt.NDArray[np.int64]  # (axes + 1,): offset of each axis, and the total length
    positions: npt.NDArray[np.int64]  # every position that belongs to a unit, slice by slice and unit by unit
    units: npt.NDArray[np.int64]  # the unit of each position, numbered through all groups
    spans: npt.NDArray[np.int64]  # number of positions of that unit in the slice

    @classmethod
    def of(cls, graph: UnitGraph) -> _Table:
        offsets = group_order(graph.groups.values())
        pieces = [(offsets[group], piece) for found in graph.slices_of.values() for group, piece in found]
        pieces += [(offsets[group.name], piece) for group in graph.groups.values() for piece in group.constants]
        axes = list(dict.fromkeys((piece.name, piece.dim) for _, piece in pieces))
        shapes = {**graph.shapes, **{name: constant.shape for name, constant in graph.constants.items()}}
        bounds = np.cumsum([0, *(shapes[name][dim] for name, dim in axes)])
        start = dict(zip(axes, bounds.tolist(), strict=False))
        spans = np.array([piece.span for _, piece in pieces], dtype=np.int64)
        sizes = np.array([piece.index.numel() for _, piece in pieces], dtype=np.int64)
        first = np.cumsum(sizes) - sizes
        fields = (spans, first, np.array([offset for offset, _ in pieces]), np.array([start[p.name, p.dim] for _, p in pieces]))
        span, begin, offset, base = (np.repeat(field.astype(np.int64), sizes) for field in fields)
        flat = [piece.index.reshape(-1).cpu() for _, piece in pieces]
        positions = torch.cat([*flat, torch.zeros(0, dtype=torch.int64)]).numpy() + base
        units = (np.arange(len(positions)) - begin) // span + offset
        return cls(axes, bounds, positions, units, span)

    def kept(self, keep: npt.NDArray[np.bool_], moved: npt.NDArray[np.int64] | None = None) -> dict[str, dict[int, Tensor]]:
        """Return state-dict key → axis → kept positions, ascending. `moved`: offset to the unit whose positions are used."""
        stays = np.ones(self.bounds[-1], dtype=bool)
        own = keep[self.units]
        stays[self.positions[~own]] = False
        found = np.flatnonzero(stays)
        ends = np.searchsorted(found, self.bounds)
        if moved is not None:
            here = np.flatnonzero(own)
            places = np.searchsorted(found, self.positions[here])
            found[places] = self.positions[here + moved[self.units[here]] * self.spans[here]]
        kept: dict[str, dict[int, Tensor]] = {}
        for at, (name, dim) in enumerate(self.axes):
            kept.setdefault(name, {})[dim] = torch.from_numpy(found[ends[at] : ends[at + 1]] - self.bounds[at])
        return kept
