"""Uniform and PerGroup: shares of units that are written down, and the only rounding from a share to a number."""

import math
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real

from torch import Tensor

from sparsekit.allocation.base import equal_in_ties
from sparsekit.allocation.limits import Multiples, check_multiples, free_counts, spread
from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.cost import CostModel


def check_ratio(ratio: float) -> float:
    """Return `ratio` as a float, or raise.

    Raises:
        InvalidValueError: not in (0, 1], or NaN.
    """
    if isinstance(ratio, bool) or not isinstance(ratio, Real):
        raise InvalidValueError(
            f"ratio must be in (0, 1], got {ratio!r} of type {type(ratio).__name__}; pass a number, such as 0.5"
        )
    if not 0.0 < ratio <= 1.0:
        advice = f"for {ratio:g} % pass {ratio / 100:g}" if 1.0 < ratio <= 100.0 else "to prune 30 % pass 0.7"
        least = ", and at least one unit of a group always stays" if ratio == 0 else ""
        raise InvalidValueError(f"ratio must be in (0, 1], got {ratio!r}; a ratio is the share kept, so {advice}{least}")
    return float(ratio)


def keep_count(ratio: float, size: int) -> int:
    """max(1, ⌈ratio · size⌉), safe against the last bit: ⌈0.1 · 10⌉ is 1.

    Args:
        ratio: Share kept, in (0, 1].
        size: Number of units, J of the layer.
    """
    return max(1, min(size, math.ceil(check_ratio(ratio) * size - 1e-9)))


@dataclass(frozen=True)
class Uniform:
    """max(1, ⌈ratio · size⌉) units of each group stay; 0.25 of 10 units are 3.

    Args:
        ratio: Share of units kept in each group, in (0, 1].

    Raises:
        InvalidValueError: a ratio outside (0, 1].
    """

    ratio: float

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def counts(
        self,
        graph: UnitGraph,
        scores: Mapping[str, Tensor],  # noqa: ARG002 - the protocol's signature
        cost: CostModel | None = None,  # noqa: ARG002
    ) -> Mapping[str, int]:
        """Round the share up in each group; tied groups of different sizes take the least of their numbers."""
        return equal_in_ties(graph, {name: keep_count(self.ratio, group.size) for name, group in graph.groups.items()})


@dataclass(frozen=True)
class PerGroup:
    """At least max(1, ⌈ratio · size⌉) units of each group stay, with a ratio of its own for each.

    ```python
    PerGroup({"conv1": 0.5, r"layer1\\..*": 0.75}, default=0.25)
    ```

    Args:
        ratios: Name of a group, or regular expression that matches all of it → share of its units that stays, in (0, 1]. A
            name goes before expressions, and the first expression before later ones.
        default: The share of all other groups.
        multiple_of: What the counts are multiples of, rounded up: one number, or kind or group name → number.

    Raises:
        InvalidValueError: a share outside (0, 1], or a multiple that is no positive integer.
    """

    ratios: Mapping[str, float] = field(default_factory=dict)
    default: float = 1.0
    multiple_of: Multiples = 1

    def __post_init__(self) -> None:
        for ratio in (*self.ratios.values(), self.default):
            check_ratio(ratio)
        check_multiples(self.multiple_of)

    def counts(
        self,
        graph: UnitGraph,
        scores: Mapping[str, Tensor],  # noqa: ARG002 - the protocol's signature
        cost: CostModel | None = None,  # noqa: ARG002
    ) -> Mapping[str, int]:
        """Round the shares up; tied groups take the least of their numbers.

        Raises:
            UnknownNameError: an entry of `ratios` names and matches no group.
        """
        for name in self.ratios:
            if name not in graph.groups and not any(re.fullmatch(name, group) for group in graph.groups):
                raise UnknownNameError(f"{name!r} names and matches no group; {nearest(name, graph.groups)}")

        def ratio(group: str) -> float:
            if group in self.ratios:
                return self.ratios[group]
            return next((share for name, share in self.ratios.items() if re.fullmatch(name, group)), self.default)

        def pick(groups: tuple[str, ...], counts: tuple[int, ...]) -> int:
            wanted = min(keep_count(ratio(name), graph.groups[name].size) for name in groups)
            return counts[min(bisect_left(counts, wanted), len(counts) - 1)]

        return spread(free_counts(graph, {}, self.multiple_of), pick)
