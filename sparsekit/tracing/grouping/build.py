"""Build groups of units from the facts of a trace: which nodes are one unit, which are unprunable, and where gates act."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import NormSite, Refusal, UnitGroup, UnitSlice, Unprunable, are_ranks
from sparsekit.labels.facts import Average, Borrow, Cause, Count, Fact, Heads, Keep, Least, Make, Merge, Multiple, Read, Tie, of
from sparsekit.labels.tracer import Tracer
from sparsekit.labels.values import NOT_ZERO, Entry, IntArray
from sparsekit.tracing.grouping.own_widths import own_widths
from sparsekit.tracing.grouping.sizes import (
    Claims,
    chosen_sizes,
    counted_parts,
    find_free,
    find_sizes,
    share_widths,
    split_ties,
)

_UNREAD = Cause("", "nothing reads its units", "expected")
_AVERAGED = Cause("", "nothing but an average over its units reads them")
# Rank of a kind of cause, 1 if it is not listed. If units have several causes, the one with the highest rank is reported.
_RANKS: Mapping[Refusal, int] = {"output": 2, "expected": 0}
_SINGLE = Cause("", "all its positions go together, and a single unit cannot go", "expected")
_KERNEL = Cause("", "its kernel takes multiples of a number of units, and there are no more than that", "expected")
_TIED = Cause("", "the other layers of the same recurrent module stay whole", "expected")

BoolArray: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Built:
    """A graph, with the data for later changes."""

    graph: UnitGraph
    nodes: Mapping[str, IntArray]  # group → root of each of its units
    sizes: Claims  # all integers that may follow the number of units; those of the graph are some of them
    root: IntArray  # the unit of each node, by the lowest of its nodes
    facts: Sequence[Fact]  # those of the trace, and what follows from them


class _Nodes:
    """Arrays over the nodes of a trace. Axes of entries, and `Make` facts, are numbered."""

    def __init__(self, entries: Sequence[Entry], size: int, facts: Sequence[Fact], root: IntArray) -> None:
        self.root = root
        self.axes = [(entry, dim) for entry in entries for dim, first in enumerate(entry.first) if first is not None]
        self.axis = np.repeat(np.arange(len(self.axes)), [entry.shape[dim] for entry, dim in self.axes])
        self.saved = np.array([not entry.constants for entry, _ in self.axes], dtype=bool)[self.axis]  # part of the state
        self.makes = of(Make, facts)
        self.made_at = np.full(size, len(self.makes), dtype=np.int64)  # the first that makes the node
        for number in range(len(self.makes) - 1, -1, -1):
            self.made_at[self.makes[number].nodes] = number
        self.made = self.made_at < len(self.makes)
        self.columns = np.zeros(size, dtype=bool)  # whether a node is on a parameter axis that multiplies units
        for read in of(Read, facts):
            if not isinstance(read.by, Cause):
                self.columns[read.by] = True

    def are_roots(self, *runs: IntArray | BoolArray) -> BoolArray:
        """Return for each node whether it is the root of a node in these runs."""
        found = np.zeros(self.root.size, dtype=bool)
        for nodes in runs:
            found[self.root[nodes]] = True
        return found


class _Causes:
    """Why units are unprunable. Of several causes of a unit, the first of the highest rank counts."""

    def __init__(self, root: IntArray, facts: Iterable[Fact]) -> None:
        self._root = root
        self.told: list[Cause] = []
        self.number = np.full(root.size, -1, dtype=np.int64)  # by root, index in `told`; -1 if the unit is prunable
        self._rank = np.full(root.size, -1, dtype=np.int64)
        for keep in of(Keep, facts):
            self.mark(keep.nodes, keep.cause)

    def mark(self, nodes: IntArray, cause: Cause) -> None:
        rank = _RANKS.get(cause.kind, 1)
        roots = self._root[nodes[nodes >= 0]]
        roots = roots[self._rank[roots] < rank]
        self.number[roots], self._rank[roots] = len(self.told), rank
        self.told.append(cause)

    @property
    def whole(self) -> BoolArray:
        """By root, whether the unit is unprunable."""
        whole: BoolArray = self.number != -1
        return whole


def _keep_unread(nodes: _Nodes, causes: _Causes, facts: Sequence[Fact]) -> None:
    averaged = nodes.are_roots(*(fact.nodes[fact.nodes >= 0] for fact in of(Average, facts)))
    read = nodes.are_roots(*(fact.nodes for fact in of(Read, facts)))
    unread = nodes.are_roots(nodes.made) & ~read & ~causes.whole
    causes.mark(np.flatnonzero(unread & averaged), _AVERAGED)
    causes.mark(np.flatnonzero(unread & ~averaged), _UNREAD)


def _choose_gates(nodes: _Nodes, causes: _Causes, tracer: Tracer, reads: Sequence[Read]) -> dict[int, frozenset[int]]:
    """Return root → axes to gate, for units whose values must be zero, since an operator without weights consumes them.

    Units become unprunable if such gates do not make their values exactly zero.
    """
    needed: dict[int, Cause] = {}
    for read in reads:
        if isinstance(read.by, Cause):
            for root in np.unique(nodes.root[read.nodes]).tolist():
                needed.setdefault(root, read.by)
    wanted = np.zeros(nodes.root.size, dtype=bool)
    wanted[list(needed)] = True
    sources: dict[int, set[int]] = {root: set() for root in needed}
    for read in reads if needed else ():
        roots = nodes.root[read.nodes]
        for root, value in np.unique(np.stack([roots, read.sources])[:, wanted[roots]], axis=1).T.tolist():
            # A parameter that multiplies its own units (columns of a recurrence) is gated by gating the values of the units.
            sources[root].add(value)
    number = {(entry.number, dim): axis for axis, (entry, dim) in enumerate(nodes.axes)}
    gates = {}
    for root, cause in needed.items():
        if causes.whole[root]:
            continue
        if NOT_ZERO in sources[root]:
            causes.mark(np.array([root]), cause)
        else:
            gated = frozenset().union(*(tracer.sources[source] for source in sources[root]))
            gates[root] = frozenset(number[key] for key in gated if key in number)
    return gates


def _find_groups(
    nodes: _Nodes, causes: _Causes, gates: Mapping[int, frozenset[int]], parts: Mapping[int, tuple[int, ...]]
) -> list[IntArray]:
    """Return the nodes of each group, int64 (units, positions), in forward order.

    Units are a group if they have equally many positions on the same axes, and are made, gated and counted alike. `parts`:
    root → numbers of the counts that it is part of.
    """
    alive = nodes.are_roots(nodes.made) & nodes.are_roots(nodes.saved) & ~causes.whole
    active = np.flatnonzero(alive[nodes.root])
    if not active.size:
        return []
    active = active[np.lexsort((active, nodes.axis[active], nodes.root[active]))]  # by unit, then by axis
    roots, axes = nodes.root[active], nodes.axis[active]
    new = np.r_[True, roots[1:] != roots[:-1]]
    runs = np.flatnonzero(new | np.r_[True, axes[1:] != axes[:-1]])  # each: the positions of one unit on one axis
    made = np.logical_or.reduceat(nodes.made[active], runs)
    signs = 2 * axes + np.repeat(made, np.diff(np.r_[runs, active.size]))
    starts = np.flatnonzero(new)
    ranks = np.minimum.reduceat(nodes.made_at[active] * nodes.root.size + active, starts)
    found: dict[tuple[object, ...], list[tuple[int, IntArray]]] = {}
    for rank, start, end in zip(ranks.tolist(), starts.tolist(), [*starts[1:].tolist(), active.size], strict=True):
        root = int(roots[start])
        alike = signs[start:end].tobytes(), gates.get(root), parts.get(root)
        found.setdefault(alike, []).append((rank, active[start:end]))
    groups = []
    for units in found.values():
        units.sort(key=lambda unit: unit[0])
        if len(units) > 1:
            groups.append((units[0][0], np.stack([unit for _, unit in units])))
        else:
            causes.mark(units[0][1], _SINGLE)
    return [group for _, group in sorted(groups, key=lambda pair: pair[0])]


def _maker(nodes: _Nodes, group: IntArray) -> Entry:
    """Return the entry that first produces the units of a group; one of the state, if there is any."""
    unit = group[0]
    first = int(unit[np.lexsort((nodes.made_at[unit], ~nodes.saved[unit]))[0]])
    return nodes.axes[int(nodes.axis[first])][0]


def _slices(nodes: _Nodes, group: IntArray, gates: frozenset[int] | None) -> tuple[list[UnitSlice], list[UnitSlice]]:
    """Return the slices of a group in the state, in forward order, and in constants. `gates`: axes to gate, if chosen."""
    axis_of = nodes.axis[group[0]]
    pieces: list[tuple[int, UnitSlice]] = []
    constants: list[UnitSlice] = []
    for axis in np.unique(axis_of).tolist():
        mine = np.sort(group[:, axis_of == axis], axis=1)
        entry, dim = nodes.axes[axis]
        reads = nodes.columns[mine]
        gated = entry.is_parameter and (bool(reads.all()) if gates is None else axis in gates)
        is_out = bool(nodes.made[mine].any()) or not reads.any()
        when = int(nodes.made_at[mine].min()) if is_out else len(nodes.makes) + axis
        index = torch.from_numpy(mine - entry.first[dim])
        for key in entry.names:
            piece = UnitSlice(key, dim, index, "out" if is_out else "in", gated)
            if entry.constants:
                constants.append(piece)
            else:
                pieces.append((when, piece))
    return [piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], constants


def _unprunable(nodes: _Nodes, causes: _Causes) -> tuple[Unprunable, ...]:
    """Return the unprunable units, one item for each module and cause, in forward order."""
    first = np.full(nodes.root.size, len(nodes.makes), dtype=np.int64)  # by root
    np.minimum.at(first, nodes.root, nodes.made_at)
    roots = np.flatnonzero(causes.whole & nodes.are_roots(nodes.saved) & (first < len(nodes.makes)))
    roots = roots[np.argsort(first[roots], kind="stable")]
    modules = [_owner(nodes.axes[nodes.axis[make.nodes[0]]][0]) for make in nodes.makes]
    places = zip(first[roots].tolist(), causes.number[roots].tolist(), strict=True)
    items = []
    for (module, cause), size in Counter((modules[made], causes.told[number]) for made, number in places).items():
        inside = "" if cause.module == module else cause.module
        items.append(Unprunable(module, size, f"{cause.reason}{cause.where}", cause.kind, inside, cause.remedy))
    return tuple(items)


def _owner(entry: Entry) -> str:
    """Return the user's module that an entry belongs to, without levels that parametrizations and torch.compile insert."""
    name, parent = entry.names[0], entry.names[0].rpartition(".")[0]
    if entry.constants:
        return entry.constants[0].module or entry.constants[0].name
    parent = re.sub(r"(^|\.)parametrizations\..*$", "", parent)
    parent = ".".join(part for part in parent.split(".") if part != "_orig_mod")
    return parent or name.rpartition(".")[2]


def components(size: int, merges: Sequence[Merge]) -> IntArray:
    """Return connected components of `size` nodes: the lowest node of each node's component, int64 (size,)."""
    parent = np.arange(size, dtype=np.int64)
    if not merges:
        return parent
    a = np.concatenate([merge.nodes for merge in merges])
    b = np.concatenate([merge.others for merge in merges])
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


def build(tracer: Tracer, shapes: Mapping[str, torch.Size], facts: Iterable[Fact], tried: Mapping[str, int]) -> Built:
    """Make the graph from the facts of a trace.

    Args:
        tracer: The trace.
        shapes: State-dict key → shape of the whole state.
        facts: The facts of the trace, and facts that were added later.
        tried: Module → number of failed choices of integers that follow the number of its units.
    """
    facts = list(facts)
    while True:
        root = components(tracer.nodes, of(Merge, facts))
        if more := split_ties(of(Count, facts), root):
            facts += more
            continue
        nodes, causes = _Nodes(tracer.entries, tracer.nodes, facts, root), _Causes(root, facts)
        _keep_unread(nodes, causes, facts)
        gates = _choose_gates(nodes, causes, tracer, of(Read, facts))
        if found := share_widths(of(Borrow, facts), root, causes.whole):
            facts += found
            continue
        groups: dict[str, UnitGroup] = {}
        members: dict[str, IntArray] = {}
        heads = nodes.are_roots(*(fact.nodes for fact in of(Heads, facts)))
        group_of: dict[int, str] = {}
        for group in _find_groups(nodes, causes, gates, counted_parts(of(Count, facts), root)):
            roots, entry = root[group[:, 0]], _maker(nodes, group)
            base = _owner(entry)
            name = next(name for name in chain([base], (f"{base}#{number}" for number in count(2))) if name not in groups)
            kind = nodes.makes[int(nodes.made_at[group].min())].kind or ("channel" if len(entry.shape) > 2 else "feature")
            kind = "head" if heads[roots[0]] else kind
            slices, constants = _slices(nodes, group, gates.get(int(roots[0])))
            kind = "rank" if are_ranks(slices) and not constants else kind
            least = [fact.number for fact in of(Least, facts) if np.isin(roots, root[fact.nodes]).any()]
            step = _multiple(of(Multiple, facts), root, roots)
            groups[name] = UnitGroup(name, len(group), kind, tuple(slices), max([1, *least]), tuple(constants), step)
            members[name] = roots
            group_of |= dict.fromkeys(roots.tolist(), name)
        equal, broken = _tied_groups(of(Tie, facts), root, group_of, groups)
        norms, changing = _find_norms(of(Average, facts), root, members)
        stuck = [Keep(members[name], _KERNEL) for name, group in groups.items() if group.multiple >= group.size]
        if not broken and not changing and not stuck:
            break
        facts += [*broken, *changing, *stuck]
    widths, unfollowed = own_widths(tracer.held, tracer.read_from, tracer.entries, root, group_of, groups)
    claims = {**widths, **find_sizes(of(Count, facts), root, group_of, groups)}
    sizes, shared = chosen_sizes(claims, tried)
    used = {piece.name for group in groups.values() for piece in group.constants}
    graph = UnitGraph(
        groups,
        dict(shapes),
        tuple(dict.fromkeys((*equal, *shared))),
        _unprunable(nodes, causes),
        sizes,
        norms,
        aliases=tuple(entry.names for entry in tracer.entries if len(entry.names) > 1 and not entry.constants),
        constants={each.name: each for entry in tracer.entries for each in entry.constants if each.name in used},
        free=find_free(of(Borrow, facts), root, group_of),
        unfollowed=unfollowed,
    )
    return Built(graph, members, claims, root, facts)


def _multiple(facts: Sequence[Multiple], root: IntArray, units: IntArray) -> int:
    """Return the divisor that kernels require of the number of kept units."""
    found = 1
    for fact in facts:
        spans = Counter(unit for unit in root[fact.nodes].tolist() if unit in units)
        found = math.lcm(found, *(fact.number // math.gcd(fact.number, span) for span in {*spans.values()}))
    return found


def _tied_groups(
    ties: Sequence[Tie], root: IntArray, group_of: Mapping[int, str], groups: Mapping[str, UnitGroup]
) -> tuple[list[tuple[str, ...]], list[Keep]]:
    """Return sets of groups that keep equally many units, and the units of ties that are not whole groups of one size."""
    sets, broken = [], list[Keep]()
    for tie in ties:
        names = [{group_of.get(unit) for unit in root[run].tolist()} for run in tie.runs]
        flat = [name for found in names if len(found) == 1 for name in found if name is not None]
        if len(flat) == len(names) and len({groups[name].size for name in flat}) == 1:
            if len(set(flat)) > 1:
                sets.append(tuple(dict.fromkeys(flat)))
        elif any(found != {None} for found in names):
            broken += [Keep(run, _TIED) for run in tie.runs]
    return sets, broken


def _find_norms(
    averages: Sequence[Average], root: IntArray, members: Mapping[str, IntArray]
) -> tuple[tuple[NormSite, ...], list[Keep]]:
    """Return the norms over units of groups, one for each call that averages over them; and the units of calls that change.

    A call changes if it averages over different units in different passes. `members`: group → root of each unit.
    """
    calls: dict[tuple[str, int], list[Average]] = {}
    for average in averages:
        calls.setdefault((average.module, average.call), []).append(average)
    names = list(members)
    group_at, unit_at = np.full(root.size, -1), np.zeros(root.size, dtype=np.int64)
    for number, roots in enumerate(members.values()):
        group_at[roots], unit_at[roots] = number, np.arange(roots.size)
    sites, changing = [], list[Keep]()
    for met in calls.values():
        units = [np.where(average.nodes >= 0, root[average.nodes], average.nodes) for average in met]
        groups = [np.where(row >= 0, group_at[row], -1) for row in units]
        if all((own == -1).all() for own in groups):
            continue
        first = met[0]
        if not all(
            average.function == first.function and average.dim == first.dim and np.array_equal(row, units[0])
            for average, row in zip(met, units, strict=True)
        ):
            changing += [Keep(average.nodes, average.cause) for average in met if average.nodes.size]
            continue
        places = [(number, np.flatnonzero(groups[0] == number)) for number in np.unique(groups[0]) if number >= 0]
        tensors = {names[number]: (torch.from_numpy(at), torch.from_numpy(unit_at[units[0][at]])) for number, at in places}
        sites.append(NormSite(first.module, first.call, first.function, first.dim, int(first.nodes.size), tensors))
    return tuple(sites), changing
