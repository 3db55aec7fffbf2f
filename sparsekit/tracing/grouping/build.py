"""From the nodes of a trace to groups of units: who is connected, who is fixed, and where gates act."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import Kind, NormSite, Refusal, UnitGroup, UnitSlice, Unprunable
from sparsekit.labels.tracer import Tracer
from sparsekit.labels.values import NOT_ZERO, Cause, Entry, IntArray
from sparsekit.tracing.grouping.sizes import Candidate, chosen_sizes, counted_parts, find_sizes, share_widths, tie_splits

_UNREAD = Cause("", "nothing reads its units", "expected")
_AVERAGED = Cause("", "nothing but an average over its units reads them")
_RANKS: Mapping[Refusal, int] = {"output": 2, "expected": 0}  # of several causes the one of the highest rank is told
_SINGLE = Cause("", "all its positions go together, and a single unit cannot go", "expected")
_TIED = Cause("", "the other layers of the same recurrent module stay whole", "expected")


@dataclass(frozen=True, eq=False)
class Built:
    """A graph, with the data for later changes.

    Args:
        graph: The units.
        nodes: Group → the first node of each of its units.
        loud: Units that stay whole for a cause that deserves a warning.
        sizes: All integers of the model that may follow the number of units; the graph's integers are some of them.
        root: The unit of each node.
    """

    graph: UnitGraph
    nodes: Mapping[str, IntArray]
    loud: tuple[Unprunable, ...]
    sizes: tuple[Candidate, ...]
    root: IntArray


class _Builder:
    """Builds groups from the nodes of a trace. Every axis of every entry has a number."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.axes = [(entry, dim) for entry in tracer.entries for dim, first in enumerate(entry.first) if first is not None]
        self.number = {(entry.number, dim): axis for axis, (entry, dim) in enumerate(self.axes)}
        sizes = [entry.shape[dim] for entry, dim in self.axes]
        self.axis_of = np.repeat(np.arange(len(sizes)), sizes)  # of each node
        self.root = components(tracer.nodes, tracer.united)
        while tie_splits(tracer, self.root):
            self.root = components(tracer.nodes, tracer.united)
        self.heads = self._roots_of(tracer.heads)
        size = tracer.nodes
        self.made_at = np.full(size, len(tracer.made), dtype=np.int64)  # first record that makes the node
        for number in range(len(tracer.made) - 1, -1, -1):
            self.made_at[tracer.made[number][0]] = number
        self.made = self.made_at < len(tracer.made)
        self.saved = np.array([not entry.constants for entry, _ in self.axes], dtype=bool)[self.axis_of]  # part of the state
        self.columns = np.zeros(size, dtype=bool)
        for nodes in tracer.columns:
            self.columns[nodes] = True
        self.gates: dict[int, frozenset[int]] = {}  # root → axes to gate, for units whose values must be zero
        self.causes: dict[Cause, int] = {}  # with their numbers
        self.cause, self.rank = (np.full(size, -1, dtype=np.int64) for _ in range(2))  # by root, -1 where it is not fixed
        self._fix_all()

    def _roots_of(self, runs: Iterable[IntArray | npt.NDArray[np.bool_]]) -> npt.NDArray[np.bool_]:
        """Tell whether each node is the root of one of these."""
        found = np.zeros(self.tracer.nodes, dtype=bool)
        for nodes in runs:
            found[self.root[nodes]] = True
        return found

    def _mark(self, nodes: IntArray, cause: Cause) -> None:
        rank = _RANKS.get(cause.kind, 1)
        roots = self.root[nodes]
        roots = roots[self.rank[roots] < rank]
        self.cause[roots], self.rank[roots] = self.causes.setdefault(cause, len(self.causes)), rank

    def _fix_all(self) -> None:
        tracer = self.tracer
        for nodes, cause in tracer.fixed:
            self._mark(nodes, cause)
        notes = (note.nodes for met in tracer.norms.values() for note in met if note is not None)
        averaged = self._roots_of(nodes[nodes >= 0] for nodes in notes)
        read = self._roots_of(nodes for nodes, _, _ in tracer.reads)
        unread = self._roots_of([self.made]) & ~read & (self.cause == -1)
        self._mark(np.flatnonzero(unread & averaged), _AVERAGED)
        self._mark(np.flatnonzero(unread & ~averaged), _UNREAD)
        self._choose_gates()
        for runs in tracer.tied:
            if any((self.cause[self.root[nodes]] != -1).any() for nodes in runs):
                for nodes in runs:
                    self._mark(nodes, _TIED)

    def _choose_gates(self) -> None:
        """Units with a reader that has no weights are gated where they are made, if that makes them exactly zero."""
        needed: dict[int, Cause] = {}
        for nodes, _, cause in self.tracer.reads:
            if cause is not None:
                for root in np.unique(self.root[nodes]).tolist():
                    needed.setdefault(root, cause)
        if not needed:
            return
        unsure = self._roots_of(self.tracer.unsure)
        wanted = np.zeros(self.tracer.nodes, dtype=bool)
        wanted[list(needed)] = True
        sources: dict[int, set[int]] = {root: set() for root in needed}
        for nodes, source, _ in self.tracer.reads:
            roots = self.root[nodes]
            for root, value in np.unique(np.stack([roots, source])[:, wanted[roots]], axis=1).T.tolist():
                # A parameter that reads its own kind (columns of a recurrence) is silenced with the values that it reads.
                sources[root].add(value)
        for root, cause in needed.items():
            if self.cause[root] != -1:
                continue
            if NOT_ZERO in sources[root] or unsure[root]:
                self._mark(np.array([root]), cause)
            else:
                gated = frozenset().union(*(self.tracer.gated_by(s) for s in sources[root]))
                self.gates[root] = frozenset(self.number[key] for key in gated if key in self.number)

    def groups(self) -> list[list[int]]:
        """Return roots of active units, grouped by signature, in forward order."""
        size, alive = self.tracer.nodes, self._roots_of([self.made]) & self._roots_of([self.saved]) & (self.cause == -1)
        active = np.flatnonzero(alive[self.root])
        self.members: dict[int, IntArray] = {}
        if not active.size:
            return []
        axis_of = self.axis_of
        active = active[np.lexsort((active, axis_of[active], self.root[active]))]
        roots, axes = self.root[active], axis_of[active]
        new_root = np.r_[True, roots[1:] != roots[:-1]]
        run = np.flatnonzero(new_root | np.r_[True, axes[1:] != axes[:-1]])  # where a run of one unit on one axis starts
        counts, makes = np.diff(np.r_[run, active.size]), np.logical_or.reduceat(self.made[active], run)
        runs = np.stack([axes[run], counts, makes])
        starts = np.flatnonzero(new_root)
        firsts = np.minimum.reduceat(self.made_at[active] * size + active, starts)  # by record, then by node
        first_run = np.searchsorted(run, starts)
        ends, last_run = np.r_[starts[1:], active.size].tolist(), np.r_[first_run[1:], run.size].tolist()
        rank: dict[int, int] = {}
        parts = counted_parts(self.tracer, self.root)
        found: dict[tuple[bytes, frozenset[int], tuple[int, ...]], list[int]] = {}
        for k, (start, low) in enumerate(zip(starts.tolist(), first_run.tolist(), strict=True)):
            root = int(roots[start])
            self.members[root] = active[start : ends[k]]
            rank[root] = int(firsts[k])
            signature = runs[:, low : last_run[k]].tobytes()
            found.setdefault((signature, self.gates.get(root, frozenset()), parts.get(root, ())), []).append(root)
        for same in found.values():
            same.sort(key=rank.__getitem__)
            if len(same) == 1:
                self._mark(np.array(same), _SINGLE)
        return sorted((same for same in found.values() if len(same) > 1), key=lambda same: rank[same[0]])

    def group(self, roots: list[int], taken: set[str]) -> UnitGroup:
        nodes = np.stack([self.members[root] for root in roots])
        record = int(self.made_at[nodes].min())
        first = nodes[0][np.lexsort((self.made_at[nodes[0]], ~self.saved[nodes[0]]))[0]]
        entry, _ = self.axes[self.axis_of[first]]
        kind: Kind = self.tracer.made[record][1] or ("channel" if len(entry.shape) > 2 else "feature")
        if self.heads[roots[0]]:
            kind = "head"
        base = _owner(entry)
        name, number = base, 1
        while name in taken:
            number += 1
            name = f"{base}#{number}"
        taken.add(name)
        gates = self.gates.get(roots[0])
        axis_of = self.axis_of[nodes[0]]
        pieces: list[tuple[int, UnitSlice]] = []
        constants: list[UnitSlice] = []
        for axis in np.unique(axis_of).tolist():
            mine = np.sort(nodes[:, axis_of == axis], axis=1)
            holder, dim = self.axes[axis]
            made = bool(self.made[mine].any())
            if gates is None:
                gated = bool(self.columns[mine].all()) and holder.is_parameter
            else:
                gated = axis in gates and holder.is_parameter
            index = torch.from_numpy(mine - holder.first[dim])
            side = "out" if made or not self.columns[mine].any() else "in"
            when = int(self.made_at[mine].min()) if side == "out" else len(self.tracer.made) + axis
            own = [UnitSlice(key, dim, index, side, gated) for key in holder.names]  # type: ignore[arg-type]
            if holder.constants:
                constants += own
            else:
                pieces += [(when, piece) for piece in own]
        pieces.sort(key=lambda pair: pair[0])
        least = [number for run, number in self.tracer.least if not set(roots).isdisjoint(self.root[run].tolist())]
        slices = tuple(piece for _, piece in pieces)
        return UnitGroup(name, len(roots), kind, slices, max([1, *least]), tuple(constants))

    def fixed(self) -> tuple[Unprunable, ...]:
        """Return the units that stay whole, one item for each module and cause."""
        counts: dict[tuple[str, int], int] = {}
        left = self.cause != -1  # fixed roots that no record has made yet
        stored = self._roots_of([self.saved])
        for nodes, _ in self.tracer.made:
            fresh = np.unique(self.root[nodes][left[self.root[nodes]] & stored[self.root[nodes]]])
            left[fresh] = False
            module = _owner(self.axes[self.axis_of[nodes[0]]][0])
            for cause, number in Counter(self.cause[fresh].tolist()).items():
                counts[module, cause] = counts.get((module, cause), 0) + number
        found, causes = [], list(self.causes)
        for (module, number), size in counts.items():
            cause = causes[number]
            inside = cause.module if cause.module != module else ""
            found.append(Unprunable(module, size, f"{cause.reason}{cause.where}", cause.kind, inside, cause.remedy))
        return tuple(found)


def _owner(entry: Entry) -> str:
    """Return the module that an entry belongs to as its user wrote it, past what parametrizing and compiling put in between."""
    name, parent = entry.names[0], entry.names[0].rpartition(".")[0]
    if entry.constants:
        return entry.constants[0].module or entry.constants[0].name
    parent = re.sub(r"(^|\.)parametrizations\..*$", "", parent)
    parent = ".".join(part for part in parent.split(".") if part != "_orig_mod")
    return parent or name.rpartition(".")[2]


def components(size: int, united: Sequence[tuple[IntArray, IntArray]]) -> IntArray:
    """Return connected components of `size` nodes: the lowest node of each node's component, int64 (size,)."""
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


def build(tracer: Tracer, shapes: Mapping[str, torch.Size]) -> Built:
    """Make the graph from the labels of a trace. `shapes`: state-dict key → shape of the whole state."""
    while True:
        builder = _Builder(tracer)
        if share_widths(tracer, builder.root, builder.cause != -1):
            continue
        taken: set[str] = set()
        groups: dict[str, UnitGroup] = {}
        nodes: dict[str, IntArray] = {}
        group_of: dict[int, str] = {}
        for roots in builder.groups():
            group = builder.group(roots, taken)
            groups[group.name], nodes[group.name] = group, np.array(roots, dtype=np.int64)
            group_of |= dict.fromkeys(roots, group.name)
        ties, broken = [], False
        for runs in tracer.tied:
            names = [{group_of.get(r) for r in builder.root[run].tolist()} for run in runs]
            flat = [next(iter(found)) for found in names if len(found) == 1]
            if len(flat) == len(runs) and None not in flat and len({groups[str(name)].size for name in flat}) == 1:
                if len(set(flat)) > 1:
                    ties.append(tuple(dict.fromkeys(str(name) for name in flat)))
            elif any(None not in found for found in names):
                broken = True
                for run in runs:
                    tracer.fix(run, _TIED)
        norms = find_sites(tracer, builder.root, nodes)
        if not broken and norms is not None:
            break
    whole = builder.fixed()
    candidates = find_sizes(tracer, builder.root, group_of, groups)
    sizes, shared = chosen_sizes(tracer, candidates)
    held = {piece.name for group in groups.values() for piece in group.constants}
    graph = UnitGraph(
        groups,
        dict(shapes),
        tuple(dict.fromkeys((*ties, *shared))),
        whole,
        sizes,
        norms,
        aliases=tuple(tuple(entry.names) for entry in tracer.entries if len(entry.names) > 1 and not entry.constants),
        constants={
            constant.name: constant for entry in tracer.entries for constant in entry.constants if constant.name in held
        },
    )
    return Built(graph, nodes, tuple(item for item in whole if not item.is_expected), candidates, builder.root)


def find_sites(tracer: Tracer, root: IntArray, nodes: Mapping[str, IntArray]) -> tuple[NormSite, ...] | None:
    """Return the norms over units that stay in some group, one for each call that averages over them.

    If the same call averages different units in different passes, they are fixed. `nodes`: group → root of each unit.

    Returns:
        None if units were fixed, so that groups must be built again.
    """
    sites, fixed = [], False
    units_of = nodes.items() if tracer.norms else ()
    unit_of = {int(root): (name, unit) for name, roots in units_of for unit, root in enumerate(roots)}
    for (module, number), met in tracer.norms.items():
        known = [note for note in met if note is not None]
        units = [np.where(note.nodes >= 0, root[note.nodes], note.nodes) for note in known]
        if not any(int(r) in unit_of for row in units for r in row):
            continue
        first = known[0]
        agree = len(known) == len(met) and all(
            note.function == first.function and note.dim == first.dim and np.array_equal(row, units[0])
            for note, row in zip(known, units, strict=True)
        )
        if not agree:
            fixed = True
            for note in known:
                tracer.fix(note.nodes, note.cause)
            continue
        places: dict[str, tuple[list[int], list[int]]] = {}
        for position, r in enumerate(units[0].tolist()):
            if r in unit_of:
                group, unit = unit_of[r]
                places.setdefault(group, ([], []))[0].append(position)
                places[group][1].append(unit)
        tensors = {group: (torch.tensor(p), torch.tensor(u)) for group, (p, u) in places.items()}
        sites.append(NormSite(module, number, first.function, first.dim, int(first.nodes.size), tensors))
    return None if fixed else tuple(sites)
