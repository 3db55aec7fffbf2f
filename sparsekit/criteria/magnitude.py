"""Magnitude: units with large weights are worth most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from sparsekit.criteria.base import View
from sparsekit.criteria.magnitudes import Order, all_slices, own_slices, unit_sums
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph


@dataclass(frozen=True)
class Magnitude:
    """The size of a unit's own parameters: filter rows, bias, norm scale.

    Scores depend on the scale of a layer, so that groups cannot be compared; `Normalised(Magnitude())` can.

    Args:
        order: 1 for the sum of absolute values, 2 for the square root of the sum of squares.
        coupled: Whether the entries that read a unit, the columns of its consumers, count too.

    Raises:
        InvalidValueError: another order.

    Source: Li et al., Pruning Filters for Efficient ConvNets, ICLR 2017.
    """

    order: Order = field(default=1, kw_only=True)
    coupled: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.order not in (1, 2):
            raise InvalidValueError(f"order must be 1 (absolute values) or 2 (squares), got {self.order!r}")

    def scores(self, graph: UnitGraph, view: View) -> Mapping[str, Tensor]:
        """Sum up each unit's weights, in their dtype."""
        weights, chosen = view.weights_for(self), all_slices if self.coupled else own_slices
        sums = {n: unit_sums(group, weights, chosen(group, weights), order=self.order) for n, group in graph.groups.items()}
        return sums if self.order == 1 else {name: values.sqrt() for name, values in sums.items()}
