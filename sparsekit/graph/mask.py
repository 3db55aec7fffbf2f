"""UnitMask and WeightMask: masks by unit or by entry."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor

from sparsekit.errors import ForeignMaskError, InvalidValueError
from sparsekit.graph.blocks import without_blocks
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import narrow_shape


class _Mask(Mapping[str, Tensor]):
    _what = "the mask"

    def __init__(self, entries: Mapping[str, Tensor]) -> None:
        for name, keep in entries.items():
            if keep.dtype != torch.bool:
                raise InvalidValueError(
                    f"{self._what} of {name!r} must be boolean, True = kept, got {keep.dtype}; compare first: scores >= 0.5"
                )
        # The caller's own tensors may change later.
        self._entries = {name: keep.detach().clone() for name, keep in entries.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, _Mask)
        return other is self or (self.keys() == other.keys() and all(torch.equal(self[name], other[name]) for name in self))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        kept = ", ".join(f"{name}: {int(keep.sum())}/{keep.numel()}" for name, keep in self.items())
        return f"{type(self).__name__}({kept})"

    def counts(self) -> dict[str, int]:
        """Return name → number of kept units or entries."""
        return dict(self._counts)

    @cached_property
    def _counts(self) -> dict[str, int]:
        return {name: int(keep.sum()) for name, keep in self.items()}


class UnitMask(_Mask):
    """Group name → bool (units,), True = kept, and the blocks that are removed. Immutable; compares by value."""

    _what = "the unit mask"

    def __init__(self, entries: Mapping[str, Tensor], *, removed: Collection[str] = ()) -> None:
        """Copy the entries to the CPU, where the index tables of a graph are.

        `removed` names blocks of the graph. Entries of groups inside of them are ignored.
        """
        meta = [name for name, keep in entries.items() if keep.is_meta]
        if meta:
            raise InvalidValueError(
                f"{self._what} of {meta[0]!r} is on the meta device and has no values; make it from a model that has data"
            )
        super().__init__({name: keep.cpu() for name, keep in entries.items()})
        if isinstance(removed, str):
            raise InvalidValueError(f"removed must be a collection of names, got the string {removed!r}; pass [{removed!r}]")
        self.removed = frozenset(removed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnitMask) and super().__eq__(other) and self.removed == other.removed

    __hash__ = None

    def __repr__(self) -> str:
        blocks = f", without {', '.join(sorted(self.removed))}" if self.removed else ""
        return f"{super().__repr__()[:-1]}{blocks})"

    def shortened(self, graph: UnitGraph) -> tuple[UnitGraph, UnitMask]:
        """Return the graph without the removed blocks, and the mask of its units; both unchanged if none is removed."""
        if not self.removed:
            return graph, self
        short = without_blocks(graph, self.removed)
        return short, UnitMask({name: self[name] for name in short.groups})

    @staticmethod
    def full(graph: UnitGraph, *, removed: Collection[str] = ()) -> UnitMask:
        """Return the mask that keeps every unit, apart from removed blocks."""
        whole = {name: torch.ones(group.size, dtype=torch.bool) for name, group in graph.groups.items()}
        return UnitMask(whole, removed=removed)

    def check(self, graph: UnitGraph) -> None:
        """Raise unless the mask belongs to `graph` and keeps enough units of each group.

        Raises:
            ForeignMaskError: the groups or their sizes differ.
            InvalidValueError: a group would keep fewer units than its `least` or a number that its kernel does not take,
                or tied groups keep different numbers.
        """
        given = tuple((name, keep.numel()) for name, keep in self.items())
        expected = graph.fingerprint()
        if sorted(given) != sorted(expected):
            strange = sorted(set(given) ^ set(expected))[:5]
            raise ForeignMaskError(
                f"the mask does not belong to this graph (differing groups and sizes: {strange});"
                " make it with make_mask(criterion, graph, ratio, context) or UnitMask.full(graph)"
            )
        if self.removed:
            graph, left = self.shortened(graph)
            left.check(graph)
            return
        for name, kept in self.counts().items():
            if kept < (least := graph.groups[name].least):
                number = "one" if least == 1 else least
                raise InvalidValueError(f"the mask keeps {kept or 'no'} unit of group {name!r}; at least {number} must stay")
        graph.check_counts(self.counts())

    def density(self, graph: UnitGraph) -> float:
        """Return the share of entries of the model's state that are kept, in (0, 1], tied tensors once."""
        self.check(graph)
        total = sum(map(math.prod, graph.tensors.values()))
        graph, left = self.shortened(graph)
        indices = graph.kept_indices(left)
        return sum(math.prod(narrow_shape(shape, indices.get(name, {}))) for name, shape in graph.tensors.items()) / total


class WeightMask(_Mask):
    """State-dict key → bool, shaped like the entry, True = kept. Keys left out are kept whole."""

    _what = "the weight mask"

    def check(self, graph: UnitGraph) -> None:
        """Raise unless every entry has the shape of the model's tensor.

        Raises:
            ForeignMaskError: an unknown key or another shape.
        """
        for name, keep in self.items():
            if graph.shapes.get(name) != keep.shape:
                raise ForeignMaskError(
                    f"the weight mask has {name!r} of shape {tuple(keep.shape)}, the model has {graph.shapes.get(name)}"
                )
