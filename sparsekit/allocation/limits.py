"""Limits: the least and the largest share of its units that a group may keep."""

from __future__ import annotations

import math
from collections.abc import Mapping

from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit.graph.graph import UnitGraph

Limits = Mapping[str, tuple[float, float]]
"""Group name → (least, largest) share of its units that stay, each in [0, 1]."""


def check_limits(limits: Limits) -> None:
    """Raise unless every entry is a pair of shares in order.

    Raises:
        InvalidValueError: no pair, or not 0 ≤ least ≤ largest ≤ 1 with largest above 0.
    """
    for name, pair in limits.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(_is_share(share) for share in pair):
            raise InvalidValueError(
                f"the limit of {name!r} must be (least, largest) share of its units that stays, both in [0, 1], got {pair!r};"
                " (0.5, 1.0) keeps at least half"
            )
        if pair[0] > pair[1] or pair[1] == 0:
            raise InvalidValueError(
                f"the limit of {name!r} must have least ≤ largest and largest above 0, got {tuple(pair)};"
                " at least one unit stays"
            )


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def count_range(graph: UnitGraph, limits: Limits, groups: tuple[str, ...]) -> tuple[int, int]:
    """The least and the largest number of units that tied groups may all keep.

    Args:
        graph: The groups.
        limits: Shares by group name; groups left out may keep 1 to all of their units.
        groups: Those that keep equally many units.

    Raises:
        UnknownNameError: a limit names no group.
        InvalidValueError: no number of units is within the limits of all `groups`.
    """
    for name in limits:
        if name not in graph.groups:
            raise UnknownNameError(f"a limit names no group: {name!r}; {nearest(name, graph.groups)}")
    least, largest = 1, min(graph.groups[name].size for name in groups)
    for name in groups:
        low, high = limits.get(name, (0.0, 1.0))
        size = graph.groups[name].size
        least = max(least, math.ceil(low * size - 1e-9))
        largest = min(largest, max(1, math.floor(high * size + 1e-9)))
    if least > largest:
        raise InvalidValueError(
            f"the limits of {', '.join(map(repr, groups))}, which keep equally many units, leave no number:"
            f" at least {least} and at most {largest}; widen one of them"
        )
    return least, largest
