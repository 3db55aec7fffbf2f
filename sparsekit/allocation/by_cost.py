"""ByCost: across all groups, the units go first that are worth least for what they cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from sparsekit.allocation.walk import Search
from sparsekit.allocation.within_budget import RankedWithinBudget
from sparsekit.allocation.worth import block_losses, ranked_worth
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph


@dataclass(frozen=True)
class ByCost(RankedWithinBudget):
    """Take away the unit that loses least for what it saves of the budget, again and again, until the budget is met.

    What a unit saves is exact and taken at the present widths: the fewer channels a layer has, the less one more input
    channel of it costs. In the end whatever still fits is put back. With several budgets, what a unit saves is the sum over
    those that are still exceeded, each as a share of its limit.

    Args:
        budget: What the model may cost.
        limits: Group name → (least, largest) share of its units that stays.
        multiple_of: What the counts are multiples of: one number, or kind or group name → number.
        scale: How scores of different groups are made comparable, as in `ranked_worth`; "none" where they are already.
        thin_layer_power: Power of (size of the group / units that stay) by which a unit is worth more where few stay. With 0,
            scores are taken as they are, which may leave a group three units of 32: each alone was worth little, as long as
            the others were there. Where the loss falls as 1 / width, and the network trains on, the power is 2.

    Raises:
        InvalidValueError: a limit, multiple, scale or thin_layer_power that is not allowed.

    Source: Liu et al., Group Fisher pruning, ICML 2021 (arXiv 2108.00708), for scores by cost.
    """

    thin_layer_power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.thin_layer_power < math.inf:
            raise InvalidValueError(
                f"thin_layer_power must be a finite number >= 0, got {self.thin_layer_power}; 0 takes scores as they are"
            )

    def _search(self, graph: UnitGraph, scores: Mapping[str, Tensor]) -> Search:
        worth = ranked_worth(graph, scores, self.scale)
        worth = {name: own * (own.size / np.arange(1, own.size + 1)) ** self.thin_layer_power for name, own in worth.items()}
        return lambda problem: problem.walk(lambda groups, counts: block_losses(worth, groups, counts), by_cost=True)
