"""PerGroup: a share of units for each group, written down by hand."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from sparsekit.allocation.rounding import Multiples, check_multiples, free_counts
from sparsekit.allocation.uniform import check_ratio, keep_count
from sparsekit.allocation.walk import spread
from sparsekit.errors import UnknownNameError, nearest
from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.cost import CostModel


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
        free = free_counts(graph, {}, self.multiple_of)

        def pick(groups: tuple[str, ...], counts: tuple[int, ...]) -> int:
            wanted = min(keep_count(self._ratio(name), graph.groups[name].size) for name in groups)
            return counts[min(bisect_left(counts, wanted), len(counts) - 1)]

        return spread(free, lambda groups, counts: pick(groups, tuple(counts)))

    def _ratio(self, group: str) -> float:
        if group in self.ratios:
            return self.ratios[group]
        return next((ratio for name, ratio in self.ratios.items() if re.fullmatch(name, group)), self.default)
