"""The numbers of units that a group may keep: limits, and multiples for fast kernels."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, get_args

from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit.graph import UnitGraph, UnitGroup
from sparsekit.graph.groups import Kind

Limits = Mapping[str, tuple[float, float]]
"""Group name → (least, largest) share of its units that stay, each in [0, 1]."""

Counts: TypeAlias = Mapping[str, int]
"""Group name → number of units kept, for every group."""

Free: TypeAlias = Mapping[tuple[str, ...], tuple[int, ...]]
"""Tied groups → the numbers of units that they may keep, ascending."""


@dataclass(frozen=True)
class PreferredMultiple:
    """Prefer widths that are multiples of `step`, for which kernels are fast, if the budget can still be met closely.

    With AVX-512, kernels of PyTorch and ONNX Runtime compute 16 channels at a time. In MobileNetV2, eight channels in place of
    16 in one early layer make the whole network a seventh slower in eager PyTorch. Groups narrower than the step, and groups
    whose limits hold no multiple of it, take any width. With a budget, `allocate` tries the step, its halves down to 4, and
    then any width. It stops when at most 2 % of the budget is unused; if this is never so, the try with the least unused budget
    is taken. A step is skipped if it raises the minimum cost of a pruned model by more than a third of the gap between this
    minimum and the budget.

    Args:
        step: The preferred divisor of widths, a power of two.
    """

    step: int = 16

    @property
    def steps(self) -> tuple[int, ...]:
        """This step and its halves, down to 4."""
        return tuple(self.step >> shift for shift in range(self.step.bit_length()) if self.step >> shift >= 4)


Multiples = int | Mapping[str, int] | PreferredMultiple
"""One number for the width of every layer, or kind of unit, such as "head", or group name → units; or a preference."""


def check_limits(limits: Limits) -> None:
    """Raise InvalidValueError unless every entry is a pair with 0 ≤ least ≤ largest ≤ 1 and largest above 0."""
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


def check_multiples(multiple_of: Multiples) -> None:
    """Raise InvalidValueError unless every number is a positive integer, and the step of a preference a power of two."""
    if isinstance(multiple_of, PreferredMultiple):
        multiple_of = multiple_of.step
        if isinstance(multiple_of, int) and multiple_of & (multiple_of - 1):
            raise InvalidValueError(f"the step of a PreferredMultiple must be a power of two, such as 8, got {multiple_of}")
    for value in multiple_of.values() if isinstance(multiple_of, Mapping) else (multiple_of,):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidValueError(f"multiple_of must be a positive integer, or kind → positive integer, got {multiple_of!r}")


def step_of(group: UnitGroup, multiple_of: Multiples) -> int:
    """Return the factor of all allowed counts of a group.

    A single number means the width of the layers: 8 lets a group of heads of 4 features each keep 2, 4, 6, … heads. A mapping
    counts units; the name of a group overrides its kind.
    """
    if isinstance(multiple_of, Mapping):
        return multiple_of.get(group.name, multiple_of.get(group.kind, 1))
    if group.kind == "expert":
        return 1  # no multiple makes kernels faster
    if isinstance(multiple_of, PreferredMultiple):
        return step_of(group, multiple_of.step) if group.size * _span(group) >= multiple_of.step else 1
    if group.kind != "head":
        return multiple_of
    return multiple_of // math.gcd(multiple_of, _span(group))


def _span(group: UnitGroup) -> int:
    """Return the number of features per unit: several for a head, else 1."""
    return min((piece.span for piece in group.slices if piece.side == "out"), default=1) if group.kind == "head" else 1


def free_counts(graph: UnitGraph, limits: Limits, multiple_of: Multiples) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Return tied groups → the ascending numbers of units that they may keep; all units are always allowed."""
    check_limits(limits)
    for name in limits:
        if name not in graph.groups:
            raise UnknownNameError(f"a limit names no group: {name!r}; {nearest(name, graph.groups)}")
    known = {*graph.groups, *get_args(Kind)}
    for name in multiple_of if isinstance(multiple_of, Mapping) else ():
        if name not in known:
            raise UnknownNameError(f"multiple_of names neither a kind of unit nor a group: {name!r}; {nearest(name, known)}")
    found: dict[tuple[str, ...], tuple[int, ...]] = {}
    for groups in graph.tied_sets:
        size = min(graph.groups[name].size for name in groups)
        least, largest = max(graph.groups[name].least for name in groups), size
        for name in groups:
            low, high = limits.get(name, (0.0, 1.0))
            least = max(least, math.ceil(low * graph.groups[name].size - 1e-9))
            largest = min(largest, max(graph.groups[name].least, math.floor(high * graph.groups[name].size + 1e-9)))
        told = ", ".join(map(repr, groups))
        if least > largest:
            raise InvalidValueError(
                f"the limits of {told}, which keep equally many units, leave no number: at least {least} and at most {largest};"
                " widen one of them"
            )
        own = math.lcm(*(graph.groups[name].multiple for name in groups))
        step = math.lcm(own, *(step_of(graph.groups[name], multiple_of) for name in groups))
        counts = tuple(n for n in range(least, largest + 1) if n % step == 0 or n == size)
        if not counts and isinstance(multiple_of, PreferredMultiple):
            counts = tuple(n for n in range(least, largest + 1) if n % own == 0)
        if not counts:
            raise InvalidValueError(
                f"no multiple of {step} is between {least} and {largest} units of {told}; widen the limit or lower multiple_of"
            )
        found[groups] = counts
    return found


def spread(free: Free, at: Callable[[tuple[str, ...], tuple[int, ...]], int]) -> dict[str, int]:
    """Return group name → the count that `at` picks for its tied groups."""
    return {name: at(groups, counts) for groups, counts in free.items() for name in groups}


def least_counts(free: Free) -> dict[str, int]:
    return spread(free, lambda _, counts: counts[0])
