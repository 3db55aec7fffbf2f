"""Integers in modules that depend on the number of units: found during a trace, and set after a cut.

Models keep sizes in many places: the number of heads in a configuration, half of a width in a tuple. Integers that are read
during a trace remember their origin, so the length of a unit axis names its integer. Verification decides whether the model is
right with it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import FreeLength, SizeAttribute, UnitGroup
from sparsekit.graph.held import Path
from sparsekit.labels.facts import Borrow, Cause, Compare, Count, Fact, Keep, Merge, of
from sparsekit.labels.numbers import Held, IntArray, Size, Source

_CHOICES = 5
_ALWAYS = frozenset(range(_CHOICES))
_READ, _EQUAL, _FIRST, _SECOND = frozenset({0, 1, 2, 3}), frozenset({0, 1, 2}), frozenset({0, 1, 3}), frozenset({2})
"""The choices in which an integer changes with the units, by its origin. Choice 0 changes all integers. Choice 1 leaves out
those that only methods besides `forward` read. If a length has two factors, choices 0, 1 and 3 change the first one, and
choice 2 changes the second one. Choice 3 also leaves out integers that are merely equal to a length. Choice 4 changes only
those of layer rules."""


Claims: TypeAlias = Mapping[tuple[SizeAttribute, ...], frozenset[int]]
"""An integer that may change with the widths of some groups, for each of them → the choices in which it does."""


def _place(sizes: tuple[SizeAttribute, ...]) -> tuple[str, Path]:
    return sizes[0].module, sizes[0].path


def split_ties(counts: Iterable[Count], root: IntArray) -> list[Merge]:
    """Tie positions if a unit axis was split into several, and no operator decided along which of them units differ.

    Code such as `view(batch, groups, -1)` wants equally many units in every group, so the last axis is the one of the units.
    """
    found = []
    for count in counts:
        for dim in _varying(count.nodes, root)[:-1]:
            first = np.broadcast_to(count.nodes.take([0], dim), count.nodes.shape)
            apart = root[first] != root[count.nodes]
            if apart.any():
                found.append(Merge(first[apart], count.nodes[apart]))
    return found


def share_widths(borrows: Iterable[Borrow], root: IntArray, whole: npt.NDArray[np.bool_]) -> list[Merge | Keep]:
    """Merge axes if code reads the length of one from the other. If units on one are unprunable, so are those on the other.

    `whole`: by root, whether the unit is unprunable.
    """
    found: list[Merge | Keep] = []
    for borrow in borrows:
        nodes, others = borrow.nodes, borrow.others
        if borrow.free is not None:
            continue
        if np.array_equal(np.sort(root[nodes]), np.sort(root[others])):  # the same units, maybe in another order
            continue
        apart = root[nodes] != root[others]
        first, second = whole[root[nodes]], whole[root[others]]
        if (first != second).any():
            found += [Keep(nodes[second & ~first], borrow.cause), Keep(others[first & ~second], borrow.cause)]
        free = apart & ~first & ~second
        if free.any():
            found.append(Merge(nodes[free], others[free]))
    return found


def find_free(borrows: Iterable[Borrow], root: IntArray, group_of: Mapping[int, str]) -> tuple[FreeLength, ...]:
    """Return the lengths that must be -1 in a narrow model: sizes of groups that the code reads from other units."""
    found: dict[FreeLength, None] = {}
    for borrow in borrows:
        units = np.unique(root[borrow.nodes])
        if borrow.free is not None and not np.array_equal(units, np.unique(root[borrow.others])):
            names = dict.fromkeys(group_of[unit] for unit in units.tolist() if unit in group_of)
            found |= dict.fromkeys(replace(borrow.free, group=name) for name in names)
    return tuple(found)


def _varying(nodes: IntArray, root: IntArray) -> list[int]:
    units = root[nodes]
    return [dim for dim in range(units.ndim) if (units != units.take([0], dim)).any()]


def _rows(counts: Iterable[Count], root: IntArray) -> Iterator[tuple[Count, frozenset[Held], IntArray]]:
    """Yield every count of units by integers that a module holds: the integers, and the unit of each position of the axis."""
    for count in counts:
        if any(count.numbers):
            varying = _varying(count.nodes, root)
            if len(varying) == 1 and count.numbers[varying[0]]:
                lines = np.moveaxis(count.nodes, varying[0], 0).reshape(count.nodes.shape[varying[0]], -1)
                yield count, count.numbers[varying[0]], root[lines[:, 0]]


def counted_parts(counts: Iterable[Count], root: IntArray) -> dict[int, tuple[int, ...]]:
    """Return unit → indices of the counts that include it. Units in different counts form separate groups."""
    found: dict[int, tuple[int, ...]] = {}
    for number, (count, _, row) in enumerate(_rows(counts, root)):
        for unit in np.unique(row).tolist() if count.how == "read" else ():
            found[unit] = (*found.get(unit, ()), number)
    return found


def find_sizes(counts: Iterable[Count], root: IntArray, group_of: Mapping[int, str], groups: Mapping[str, UnitGroup]) -> Claims:
    """Return all integers of modules that may follow the number of units."""
    claims: dict[tuple[SizeAttribute, ...], frozenset[int]] = {}
    unsure: list[list[tuple[SizeAttribute, ...]]] = []
    for count, numbers, row in _rows(counts, root):
        found = [sizes for held in numbers if (sizes := tuple(followed(held, row, group_of, groups)))]
        if len(found) > 1:
            unsure.append(found)
        elif totals := _totals(count, numbers):
            found += [sizes for held in totals if (sizes := tuple(followed(held, row, group_of, groups)))]
        for sizes in found if len(numbers) == 1 or len(found) == 1 else ():
            choices = _ALWAYS if count.how == "rule" else _READ if count.how == "read" else _EQUAL
            claims[sizes] = claims.get(sizes, frozenset()) | choices
    # Of heads × head size in queries and key heads × head size in keys, the factor that both share is the head size.
    met = Counter(_place(sizes) for factors in unsure for sizes in factors)
    certain = frozenset(claims)
    for factors in unsure:
        if not certain.intersection(factors):
            ordered = sorted(factors, key=lambda sizes: (met[_place(sizes)], str(_place(sizes))))
            for number, sizes in enumerate(ordered[:2]):
                claims[sizes] = claims.get(sizes, frozenset()) | (_SECOND if number else _FIRST)
    return claims


def _totals(count: Count, numbers: frozenset[Held]) -> list[Held]:
    """Return integers that must change with the number of heads, because code divides by it: width // heads is a head size."""
    found = []
    for factors, length in zip(count.numbers, count.nodes.shape, strict=True):
        if len(numbers) == 1 and numbers < factors and len(factors) == 2:
            (heads,), (total,) = numbers, factors - numbers
            found += [total] if total.value == length * heads.value else []
    return found


def followed(
    held: Held, row: IntArray, group_of: Mapping[int, str], groups: Mapping[str, UnitGroup]
) -> Iterator[SizeAttribute]:
    """Yield the attributes by which an integer counts the units of an axis, one for each group; none if it cannot."""
    positions = Counter(row.tolist())
    names = Counter(group_of.get(unit) for unit in positions)
    entries = []
    for name, units in names.items():
        if name is None:
            continue
        spans = {span for unit, span in positions.items() if group_of.get(unit) == name}
        per_unit, rest = divmod(held.value * next(iter(spans)), row.size)
        if len(spans) > 1 or units != groups[name].size or rest or not per_unit:
            return
        entries.append(SizeAttribute(held.module, held.path, name, per_unit, held.value))
    yield from entries


def chosen_sizes(claims: Claims, tried: Mapping[str, int]) -> tuple[tuple[SizeAttribute, ...], tuple[tuple[str, ...], ...]]:
    """Return the integers that change with the number of units. `tried`: module → number of choices that were tried before.

    Returns:
        The attributes, and the groups that must keep equally many units because they share one.
    """
    chosen: dict[tuple[str, Path], list[tuple[SizeAttribute, ...]]] = {}
    for sizes, choices in claims.items():
        if tried.get(sizes[0].module, 0) in choices:
            chosen.setdefault(_place(sizes), []).append(sizes)
    # An integer may count the units of several groups, provided that they all keep equally many.
    agreed = [
        claim
        for claim in chosen.values()
        if len(claim) == 1 or (all(len(sizes) == 1 for sizes in claim) and len({sizes[0].per_unit for sizes in claim}) == 1)
    ]
    shared = {tuple(sizes[0].group for sizes in claim) for claim in agreed if len(claim) > 1}
    return tuple(size for claim in agreed for size in claim[0]), tuple(sorted(shared))


def other_choices(claims: Claims, group: str, tried: Mapping[str, int]) -> dict[str, int]:
    """Return module → next choice of integers to follow a group whose removal was not exact; empty if none is left."""
    mine = [sizes for sizes in claims if any(size.group == group for size in sizes)]
    found = {}
    for module in {sizes[0].module for sizes in mine}:
        choices = [
            {sizes for sizes in mine if sizes[0].module == module and number in claims[sizes]} for number in range(_CHOICES)
        ]
        now = tried.get(module, 0)
        following = next((number for number in range(now + 1, _CHOICES) if choices[number] not in choices[: now + 1]), None)
        if following is not None:
            found[module] = following
    return found


def literal_cause(counts: Iterable[Count], root: IntArray, units: IntArray) -> Cause | None:
    """Return the cause if a number in the code is the length of an axis of these units."""
    remedy = "write -1 in its place, or read it from an attribute of the module"
    for count in counts:
        code = count.cause.where.partition(" (")[2]
        lengths = [count.nodes.shape[dim] for dim in _varying(count.nodes, root)] if count.literals else []
        for number in count.literals:
            if number in lengths and np.isin(root[count.nodes], units).any() and re.search(rf"\b{number}\b", code):
                return replace(count.cause, reason=f"the number {number} is written in the code", kind="number", remedy=remedy)
    return None


def compared_groups(
    facts: Iterable[Fact], root: IntArray, nodes: Mapping[str, IntArray], graph: UnitGraph
) -> list[frozenset[str]]:
    """Return, for each module, the groups whose widths its code has compared, rounded or converted.

    Such code may branch at one particular width, or at a combination of widths of these groups.
    """
    found = []
    compared: dict[str, set[Source]] = {}
    for fact in of(Compare, facts):
        compared.setdefault(fact.module, set()).update(fact.sources)
    for sources in compared.values():
        held = {(source.module, source.path) for source in sources if isinstance(source, Held)}
        modules = tuple(f"{source.module}." for source in sources if isinstance(source, Size) and source.module)
        read = [source.nodes for source in sources if isinstance(source, Size)]
        units = np.unique(root[np.concatenate(read)]) if read else np.zeros(0, dtype=np.int64)
        names = {name for name, own in nodes.items() if np.isin(own, units).any()}
        names |= {size.group for size in graph.sizes if (size.module, size.path) in held}
        names |= {n for n, g in graph.groups.items() if any(f"{s.name.rpartition('.')[0]}." in modules for s in g.slices)}
        found.append(frozenset(names))
    return found
