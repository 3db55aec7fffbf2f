"""The label store: all that a trace has learnt about nodes, and which nodes are connected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sparsekit.graph.groups import Kind
from sparsekit.layers.labels.values import ALWAYS_ZERO, NOT_ZERO, Entry, IntArray, Labels, TensorLabels


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


@dataclass(frozen=True, eq=False)
class Split:
    """A place where the model's code lays one axis of units over several, with sizes of its own.

    Args:
        nodes: int64, one axis for each axis of the result along which units differ.
        module: Qualified name of the module whose code does it.
        numbers: Attribute → value of the plain integers of that module.
    """

    nodes: IntArray
    module: str
    numbers: Mapping[str, int]


@dataclass(eq=False)
class LabelStore:
    """All that a trace has learnt about nodes. Vectorised: nothing here loops over units.

    Args:
        nodes: Number of nodes.
        entries: Parameters and buffers, in the order of the state.
        united: Pairs of node runs that are one unit, position by position.
        fixed: Nodes whose units stay whole, with the cause.
        made: Nodes that make the values of their units, in forward order, with the module and the kind if it is known.
        columns: Nodes of parameter axes that multiply the units which they read.
        reads: (nodes, sources, cause) of every reader; the cause is set if nothing of a parameter multiplies the units.
        tied: Runs of nodes that must keep equally many units.
        unsure: Nodes whose values are not certain to be zero when gated, because they start from a state passed in.
        heads: Nodes whose units are attention heads: each makes a map of its own over the positions.
        splits: Where code lays units over several axes.
        attempts: Module → how many choices of integers that follow the number of its units have failed.
        counts: (nodes, module, attribute) of sizes that no parameter tells, such as those of a norm without a scale.
    """

    nodes: int = 0
    entries: list[Entry] = field(default_factory=list)
    united: list[tuple[IntArray, IntArray]] = field(default_factory=list)
    fixed: list[tuple[IntArray, Cause]] = field(default_factory=list)
    made: list[tuple[IntArray, str, Kind | None]] = field(default_factory=list)
    columns: list[IntArray] = field(default_factory=list)
    reads: list[tuple[IntArray, IntArray, Cause | None]] = field(default_factory=list)
    tied: list[tuple[IntArray, ...]] = field(default_factory=list)
    unsure: list[IntArray] = field(default_factory=list)
    heads: list[IntArray] = field(default_factory=list)
    splits: list[Split] = field(default_factory=list)
    attempts: dict[str, int] = field(default_factory=dict)
    counts: list[tuple[IntArray, str, str]] = field(default_factory=list)
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

    def fix(self, nodes: IntArray, cause: Cause) -> None:
        """Keep the units of these nodes whole."""
        nodes = nodes[nodes >= 0]
        if nodes.size:
            self.fixed.append((nodes, cause))


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
