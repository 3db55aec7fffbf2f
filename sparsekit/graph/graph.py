"""UnitGraph: what can be removed from a model, as data only.

The graph is the one truth about structure. Gates, masks, magnitudes, compaction, expansion, costs and uploads all
follow from its index tables; nothing here depends on the kind of layer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsekit.errors import ForeignMaskError, InvalidValueError
from sparsekit.graph.groups import NormSite, SizeAttribute, UnitGroup, UnitSlice, Unprunable, group_order
from sparsekit.graph.index import gate, narrow_shape
from sparsekit.graph.layers import Layer
from sparsekit.graph.state import StateDict

_SHOWN = 6
_REMEMBERED = 8
_FORMAT = 2  # of the JSON text


@dataclass(frozen=True, eq=False)
class UnitGraph:
    """The groups of a model, in forward order, with the shape of every entry of its state.

    Args:
        groups: Group name → group.
        shapes: State-dict key → shape, for the whole state.
        ties: Sets of groups that must keep equally many units (the layers of a stacked LSTM have one hidden size).
        unprunable: Units that were found but cannot be removed exactly.
        sizes: Integers of the model's own modules that follow the number of units.
        norms: Calls that average over kept units only, found with prune_norms=True; see `sparsekit.surgery.kept_norms`.
        layers: Who reads which entries, in forward order, where somebody asked for it; see `sparsekit.tracing.layer_order`.
    """

    groups: Mapping[str, UnitGroup]
    shapes: Mapping[str, torch.Size]
    ties: tuple[tuple[str, ...], ...] = ()
    unprunable: tuple[Unprunable, ...] = ()
    sizes: tuple[SizeAttribute, ...] = ()
    norms: tuple[NormSite, ...] = ()
    layers: tuple[Layer, ...] = ()

    def __repr__(self) -> str:
        """A summary on one line: `print(graph.groups[name])` shows one group, `sparsekit units` all of them."""
        shown = [f"{group.name}: {group.size} {group.kind}s" for group in list(self.groups.values())[:_SHOWN]]
        more = len(self.groups) - len(shown)
        listed = ", ".join([*shown, f"and {more} more"] if more else shown)
        entries = sum(math.prod(shape) for shape in self.shapes.values())
        whole = f"; {len(self.unprunable)} cannot be pruned" if self.unprunable else ""
        groups = f"{len(self.groups)} group{'' if len(self.groups) == 1 else 's'}"
        return f"UnitGraph({self.units:,} units in {groups} over {entries:,} entries: {listed}{whole})"

    @property
    def units(self) -> int:
        """Number of units of all groups, J in the paper."""
        return sum(group.size for group in self.groups.values())

    @cached_property
    def tied_sets(self) -> tuple[tuple[str, ...], ...]:
        """All groups, in sets that keep equally many units, in forward order; most sets hold one group.

        Ties that share a group are one: of (a, b) and (b, c) comes (a, b, c).
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
    def _axes(self) -> Mapping[str, Mapping[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]]:
        """State-dict key → axis → (positions that belong to units, their units numbered through all groups)."""
        found: dict[str, dict[int, list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]]] = {}
        offsets = group_order(self.groups.values())
        for name, pieces in self.slices_of.items():
            axes = found.setdefault(name, {})
            for group, piece in pieces:
                index = piece.index.cpu().numpy()
                units = np.arange(offsets[group], offsets[group] + index.shape[0], dtype=np.int64)
                axes.setdefault(piece.dim, []).append((index.reshape(-1), units.repeat(index.shape[1])))
        return {
            name: {dim: (np.concatenate([p for p, _ in parts]), np.concatenate([u for _, u in parts]))
                   for dim, parts in axes.items()}
            for name, axes in found.items()
        }  # fmt: skip

    def check_counts(self, counts: Mapping[str, int]) -> None:
        """Raise unless tied groups keep equally many units.

        Raises:
            InvalidValueError: two tied groups differ.
        """
        for tied in self.ties:
            kept = {name: counts[name] for name in tied}
            if len(set(kept.values())) > 1:
                raise InvalidValueError(f"groups {', '.join(tied)} share one size and must keep equally many units, got {kept}")

    def check_state(self, state: StateDict, mask: Mapping[str, Tensor] | None = None, *, what: str = "the state") -> None:
        """Raise unless `state` has the keys and shapes of the model that was traced.

        Args:
            state: State-dict key → tensor; keys that the model does not have are ignored.
            mask: Group name → bool (units,): the state is then that of the model compacted with it.
            what: Names the state in the message.

        Raises:
            ForeignMaskError: a key or a shape differs.
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

        Gates of 0 and 1 are exact: the model computes what the compacted one does. A gate between them multiplies the unit's
        contribution where the unit is gated at its readers, and else is exact only as far as what lies between the entries that
        make the unit and its readers maps `g · x` to `g · f(x)`, as ReLU does and tanh does not; see `UnitSlice.gated`.

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
        """Which positions stay along each axis that units touch.

        Args:
            keep: Group name → bool (units,), for every group.

        Returns:
            State-dict key → axis → int64 (kept,), ascending; the tensors are read-only. Axes and keys that no unit touches are
            absent.
        """
        kept = np.concatenate([keep[name].cpu().numpy() for name in self.groups] or [np.zeros(0, dtype=bool)])
        key = kept.tobytes()
        if key not in self._recent:
            while len(self._recent) >= _REMEMBERED:
                self._recent.pop(next(iter(self._recent)))
            self._recent[key] = self._positions(kept)
        return {name: dict(axes) for name, axes in self._recent[key].items()}

    @cached_property
    def _recent(self) -> dict[bytes, dict[str, dict[int, Tensor]]]:
        """What the last few masks keep: loading, cutting, sending and checking all ask, about the same mask."""
        return {}

    def _positions(self, kept: npt.NDArray[np.bool_]) -> dict[str, dict[int, Tensor]]:
        indices: dict[str, dict[int, Tensor]] = {}
        for name, axes in self._axes.items():
            found = indices[name] = {}
            for dim, (positions, units) in axes.items():
                stays = np.ones(self.shapes[name][dim], dtype=bool)
                stays[positions[~kept[units]]] = False
                found[dim] = torch.from_numpy(np.flatnonzero(stays))
        return indices

    def to_json(self) -> str:
        """The graph as JSON text, exact, its fields by name and tensors as lists; `from_json` is its inverse."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, default=Tensor.tolist)

    @staticmethod
    def from_json(text: str) -> UnitGraph:
        """Read what `to_json` wrote.

        Raises:
            InvalidValueError: the text is not a graph of this format.
        """
        try:
            raw = json.loads(text)
            if raw["format"] != _FORMAT:
                raise InvalidValueError(f"unit graph of format {raw['format']!r}; this version reads {_FORMAT}")
            return UnitGraph(
                {name: _read_group(group) for name, group in raw["groups"].items()},
                {name: torch.Size(shape) for name, shape in raw["shapes"].items()},
                tuple(map(tuple, raw["ties"])),
                tuple(Unprunable(**item) for item in raw["unprunable"]),
                tuple(SizeAttribute(**item) for item in raw["sizes"]),
                tuple(_read_norm(site) for site in raw["norms"]),
                tuple(
                    Layer(item["name"], *(tuple(item[key]) for key in ("entries", "reads", "frozen"))) for item in raw["layers"]
                ),
            )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise InvalidValueError(f"this text is not a unit graph: {error!r}") from error

    def fingerprint(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the groups: what a mask must agree with."""
        return tuple((group.name, group.size) for group in self.groups.values())


def _read_group(raw: dict[str, Any]) -> UnitGroup:
    slices = (UnitSlice(**{**piece, "index": torch.tensor(piece["index"], dtype=torch.int64)}) for piece in raw["slices"])
    return UnitGroup(**{**raw, "slices": tuple(slices)})


def _read_norm(raw: dict[str, Any]) -> NormSite:
    places = {name: tuple(torch.tensor(t, dtype=torch.int64) for t in pair) for name, pair in raw["places"].items()}
    return NormSite(**{**raw, "places": places})
