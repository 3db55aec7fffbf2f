"""Rounding: numbers of units that are multiples of what a kernel likes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from sparsekit.allocation.limits import Limits, check_limits, count_range
from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import Kind, UnitGroup


@dataclass(frozen=True)
class Liked:
    """Multiples that a device likes, where they cost nothing else.

    A group of fewer units than a step keeps any number, and so does one whose limits hold no multiple. An allocation within a
    budget halves the step until at most 2 % of the budget are left, and until groups at their least number, which is a step or
    all of their units, take at most a third of what there is to give away: narrow networks have small steps.

    Args:
        step: Width of the layers: `best_multiple` of the device.
    """

    step: int


Multiples = int | Mapping[str, int] | Liked
"""One number for the width of every layer, or kind of unit ("channel", "feature", "cell", "head") or group name → units; or
what a device likes."""


def check_multiples(multiple_of: Multiples) -> None:
    """Raise unless every number is a positive integer.

    Raises:
        InvalidValueError: it is not.
    """
    if isinstance(multiple_of, Liked):
        multiple_of = multiple_of.step
    for value in multiple_of.values() if isinstance(multiple_of, Mapping) else (multiple_of,):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidValueError(f"multiple_of must be a positive integer, or kind → positive integer, got {multiple_of!r}")


def step_of(group: UnitGroup, multiple_of: Multiples) -> int:
    """The number that the count of a group must be a multiple of.

    A single number means the width of the layers: 8 lets a group of heads of 4 features each keep 2, 4, 6, … heads. A mapping
    counts units; the name of a group goes before its kind.
    """
    if isinstance(multiple_of, Mapping):
        return multiple_of.get(group.name, multiple_of.get(group.kind, 1))
    if isinstance(multiple_of, Liked):
        step = step_of(group, multiple_of.step)
        return step if group.size >= step else 1
    if group.kind != "head":
        return multiple_of
    span = min((piece.span for piece in group.slices if piece.side == "out"), default=1)
    return multiple_of // math.gcd(multiple_of, span)


def free_counts(graph: UnitGraph, limits: Limits, multiple_of: Multiples) -> dict[tuple[str, ...], tuple[int, ...]]:
    """The numbers of units that each set of tied groups may keep.

    Args:
        graph: The groups.
        limits: Least and largest share by group name.
        multiple_of: What the numbers are multiples of. Keeping all units is always allowed, whatever their number.

    Returns:
        Tied groups → numbers, ascending, at least one.

    Raises:
        UnknownNameError: a limit or a multiple names neither a group nor a kind.
        InvalidValueError: no number is left.
    """
    check_limits(limits)
    check_multiples(multiple_of)
    if isinstance(multiple_of, Mapping):
        known = {*graph.groups, *get_args(Kind)}
        for name in multiple_of:
            if name not in known:
                raise UnknownNameError(
                    f"multiple_of names neither a kind of unit nor a group: {name!r}; {nearest(name, known)}"
                )
    found: dict[tuple[str, ...], tuple[int, ...]] = {}
    for groups in graph.tied_sets:
        least, largest = count_range(graph, limits, groups)
        step = math.lcm(*(step_of(graph.groups[name], multiple_of) for name in groups))
        size = min(graph.groups[name].size for name in groups)
        counts = tuple(n for n in range(least, largest + 1) if n % step == 0 or n == size)
        if not counts and isinstance(multiple_of, Liked):
            counts = tuple(range(least, largest + 1))
        if not counts:
            raise InvalidValueError(
                f"no multiple of {step} lies between {least} and {largest} units of {', '.join(map(repr, groups))};"
                " widen the limit or lower multiple_of"
            )
        found[groups] = counts
    return found
