"""Uniform: the same share of units stays in every group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

from torch import Tensor

from sparsekit.allocation.base import equal_in_ties
from sparsekit.errors import InvalidValueError
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
        advice = ""
        if 1.0 < ratio <= 100.0:
            advice = f"; a ratio is the share kept, so for {ratio:g} % pass {ratio / 100:g}"
        elif ratio == 0:
            advice = "; a ratio is the share kept, so to prune 30 % pass 0.7, and at least one unit of a group always stays"
        else:
            advice = "; a ratio is the share kept, so to prune 30 % pass 0.7"
        raise InvalidValueError(f"ratio must be in (0, 1], got {ratio!r}{advice}")
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
