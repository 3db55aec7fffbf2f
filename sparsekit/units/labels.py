"""Labels: which unit each position along an axis of a tensor belongs to, and the ledger of what was learnt about units.

A *node* is one position along one axis of one state entry. Tensors in a trace carry, per axis, the node that each position
stems from; the operators of the trace unite nodes, mark them as made or read, and freeze them. Units are what is
connected in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sparsekit.units.graph import Kind

__all__ = [
    "ALWAYS_ZERO",
    "NOT_ZERO",
    "OUTPUT",
    "Cause",
    "Entry",
    "IntArray",
    "Labels",
    "Ledger",
    "TensorLabels",
    "components",
    "uniform",
]

IntArray: TypeAlias = npt.NDArray[np.int64]

NO_UNIT = -1  # a position that belongs to no unit, such as a raw input in a concatenation
ANY = -2  # a position of an axis along which the value is constant, such as an expanded one: it fits any unit

NOT_ZERO = 0  # source of a value that is not zero when its unit is gated away
ALWAYS_ZERO = 1  # source of a value that is zero whatever is gated


@dataclass(frozen=True, eq=False)
class Labels:
    """What the positions along one axis belong to.

    Args:
        nodes: int64 (size,); a node, NO_UNIT or ANY.
        sources: int64 (size,); which state entries must be gated for the value to be exactly zero, as an id of
            `Ledger.source`; NOT_ZERO if no gate does it.
    """

    nodes: IntArray
    sources: IntArray

    @property
    def size(self) -> int:
        """Positions along the axis."""
        return int(self.nodes.shape[0])

    @property
    def is_uniform(self) -> bool:
        """True where the value is constant along the axis."""
        return self.size > 0 and int(self.nodes[0]) == ANY

    def take(self, positions: IntArray | slice) -> Labels:
        """The labels at some positions."""
        return Labels(self.nodes[positions], self.sources[positions])

    def without_zero(self) -> Labels:
        """The same units, whose values are no longer zero when gated away."""
        return Labels(self.nodes, np.full(self.size, NOT_ZERO, dtype=np.int64))

    def same(self, other: Labels) -> bool:
        """Equal nodes and sources."""
        return np.array_equal(self.nodes, other.nodes) and np.array_equal(self.sources, other.sources)


def uniform(size: int, source: int = NOT_ZERO) -> Labels:
    """Labels of an axis along which the value is constant."""
    return Labels(np.full(size, ANY, dtype=np.int64), np.full(size, source, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Entry:
    """One parameter or buffer, whatever names it has.

    Args:
        names: All its state-dict keys; more than one if it is tied.
        shape: Of the dense tensor.
        is_parameter: False for buffers, which are cut but never gated.
        number: Position in the ledger.
        first: First node of each axis; None where the axis has one position and hence nothing to remove.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    is_parameter: bool
    number: int
    first: tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class TensorLabels:
    """What is known about a tensor in a trace.

    Args:
        axes: Labels per axis; None for an ordinary axis such as batch, time or space.
        entry: Set if the tensor holds nothing but rearranged values of this entry.
        parts: If set, the tensor is a stack along axis 0 of parts with different units (the last states of the layers
            of an LSTM); `axes` are then all None.
    """

    axes: tuple[Labels | None, ...]
    entry: Entry | None = None
    parts: tuple[TensorLabels, ...] | None = None

    @property
    def has_units(self) -> bool:
        """True if a position of some axis belongs to a unit."""
        if self.parts is not None:
            return True
        return any(axis is not None and not axis.is_uniform for axis in self.axes)

    def all_nodes(self) -> IntArray:
        """The nodes of all axes and parts."""
        found = [axis.nodes for axis in self.axes if axis is not None]
        found += [part.all_nodes() for part in self.parts or ()]
        nodes: IntArray = np.concatenate(found) if found else np.zeros(0, dtype=np.int64)
        return nodes[nodes >= 0]

    def with_axis(self, dim: int, labels: Labels | None) -> TensorLabels:
        """The same with one axis replaced."""
        return replace(self, axes=tuple(labels if d == dim else axis for d, axis in enumerate(self.axes)))

    def computed(self) -> TensorLabels:
        """The same units on a tensor that is no mere rearrangement of an entry."""
        return TensorLabels(self.axes, None, self.parts)

    def same(self, other: TensorLabels | None) -> bool:
        """Equal labels on every axis."""
        if other is None or len(self.axes) != len(other.axes) or self.parts is not None or other.parts is not None:
            return False
        pairs = zip(self.axes, other.axes, strict=True)
        return all(a is b or (a is not None and b is not None and a.same(b)) for a, b in pairs)


@dataclass(frozen=True)
class Cause:
    """Why units stay whole.

    Args:
        module: Qualified name of the module in which it happened.
        reason: One phrase.
        quiet: True for what is normal and needs no warning, such as the units of the output layer.
    """

    module: str
    reason: str
    quiet: bool


OUTPUT = Cause("", "model output", True)
"""Outranks all others: it is normal that the units of the last layer stay, whatever they pass through on the way out."""


@dataclass(eq=False)
class Ledger:
    """All that a trace has learnt about nodes. Vectorised: nothing here loops over units.

    Args:
        nodes: How many there are.
        entries: Parameters and buffers, in the order of the state.
        united: Pairs of node runs that are one unit, position by position.
        frozen: Nodes whose units stay whole, with the cause.
        made: Nodes that make the values of their units, in forward order, with the module and the kind if it is known.
        columns: Nodes of parameter axes that multiply the units which they read.
        reads: (nodes, sources, cause) of every reader; the cause is set if nothing of a parameter multiplies the units.
        tied: Runs of nodes that must keep equally many units.
        looked_up: Numbers of the entries that are used as embedding tables.
        unsure: Nodes whose values are not certain to be zero when gated, because they start from a state passed in.
    """

    nodes: int = 0
    entries: list[Entry] = field(default_factory=list)
    united: list[tuple[IntArray, IntArray]] = field(default_factory=list)
    frozen: list[tuple[IntArray, Cause]] = field(default_factory=list)
    made: list[tuple[IntArray, str, Kind | None]] = field(default_factory=list)
    columns: list[IntArray] = field(default_factory=list)
    reads: list[tuple[IntArray, IntArray, Cause | None]] = field(default_factory=list)
    tied: list[tuple[IntArray, ...]] = field(default_factory=list)
    looked_up: set[int] = field(default_factory=set)
    unsure: list[IntArray] = field(default_factory=list)
    _sources: list[frozenset[tuple[int, int]]] = field(default_factory=lambda: [frozenset(), frozenset()])
    _source_ids: dict[frozenset[tuple[int, int]], int] = field(default_factory=dict)

    def add_entry(self, names: Sequence[str], shape: Sequence[int], *, is_parameter: bool) -> Entry:
        """Give every position of every axis of a state entry a fresh node."""
        first: list[int | None] = []
        for size in shape:
            first.append(self.nodes if size > 1 else None)
            self.nodes += size if size > 1 else 0
        entry = Entry(tuple(names), tuple(shape), is_parameter, len(self.entries), tuple(first))
        self.entries.append(entry)
        return entry

    def labels_of(self, entry: Entry) -> TensorLabels:
        """The labels of an entry as it is."""
        axes: list[Labels | None] = []
        for dim, (start, size) in enumerate(zip(entry.first, entry.shape, strict=True)):
            if start is None:
                axes.append(None)
                continue
            source = self.source({(entry.number, dim)}) if entry.is_parameter else NOT_ZERO
            axes.append(Labels(np.arange(start, start + size, dtype=np.int64), np.full(size, source, dtype=np.int64)))
        return TensorLabels(tuple(axes), entry)

    def source(self, gated: set[tuple[int, int]] | frozenset[tuple[int, int]]) -> int:
        """The id of a set of (entry number, axis) that must all be gated for a value to be zero."""
        key = frozenset(gated)
        if not key:
            return ALWAYS_ZERO
        if key not in self._source_ids:
            self._source_ids[key] = len(self._sources)
            self._sources.append(key)
        return self._source_ids[key]

    def gated_by(self, source: int) -> frozenset[tuple[int, int]]:
        """The set behind an id."""
        return self._sources[source]

    def both(self, a: IntArray, b: IntArray) -> IntArray:
        """Sources of a value that is zero where both `a` and `b` are zero."""
        out = np.full(a.shape[0], NOT_ZERO, dtype=np.int64)
        pairs = np.unique(np.stack([a, b]), axis=1)
        for x, y in pairs.T.tolist():
            if x != NOT_ZERO and y != NOT_ZERO:
                out[(a == x) & (b == y)] = self.source(self._sources[x] | self._sources[y])
        return out

    def unite(self, a: IntArray, b: IntArray, cause: Cause) -> None:
        """Make the nodes of `a` and `b` one unit, position by position; freeze those that meet no unit."""
        lonely = (a == NO_UNIT) != (b == NO_UNIT)
        if lonely.any():
            self.freeze(np.maximum(a, b)[lonely], cause)
        pairs = (a >= 0) & (b >= 0) & (a != b)
        if pairs.any():
            self.united.append((a[pairs], b[pairs]))

    def freeze(self, nodes: IntArray, cause: Cause) -> None:
        """Keep the units of these nodes whole."""
        nodes = nodes[nodes >= 0]
        if nodes.size:
            self.frozen.append((nodes, cause))

    def make(self, nodes: IntArray, module: str, kind: Kind | None = None) -> None:
        """Note that these entry positions make the values of their units."""
        nodes = nodes[nodes >= 0]
        if nodes.size:
            self.made.append((nodes, module, kind))

    def read(self, values: Labels, columns: IntArray | None, cause: Cause | None = None) -> None:
        """Note a reader of units.

        Args:
            values: The units as they are read.
            columns: Nodes of the parameter axis that multiplies them; None if nothing of a parameter does, so that the
                values themselves must be zero where a unit is dropped.
            cause: Why the units stay whole if `columns` is None and the values are not zero.
        """
        where = values.nodes >= 0
        if columns is not None:
            self.columns.append(columns[columns >= 0])
        self.reads.append((values.nodes[where], values.sources[where], cause if columns is None else None))


def components(size: int, united: Sequence[tuple[IntArray, IntArray]]) -> IntArray:
    """Connected components of `size` nodes: the lowest node of each node's component, int64 (size,)."""
    parent = np.arange(size, dtype=np.int64)
    if not united:
        return parent
    a = np.concatenate([pair[0] for pair in united])
    b = np.concatenate([pair[1] for pair in united])
    while True:
        low, high = np.minimum(parent[a], parent[b]), np.maximum(parent[a], parent[b])
        open_edges = low != high
        if not open_edges.any():
            return parent
        a, b, low, high = a[open_edges], b[open_edges], low[open_edges], high[open_edges]
        np.minimum.at(parent, high, low)
        while True:
            jumped = parent[parent]
            if np.array_equal(jumped, parent):
                break
            parent = jumped
