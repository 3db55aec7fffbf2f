"""ByCost and Global: the units go first that are worth least, for what they cost or wherever they are."""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from sparsekit.allocation.limits import Counts
from sparsekit.allocation.within_budget import Problem, RankedWithinBudget
from sparsekit.allocation.worth import block_losses, ranked_worth
from sparsekit.errors import InvalidValueError


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

    def _find(self, problem: Problem) -> Counts:
        worth = ranked_worth(problem.graph, problem.scores, self.scale)
        worth = {name: own * (own.size / np.arange(1, own.size + 1)) ** self.thin_layer_power for name, own in worth.items()}
        return problem.walk(partial(block_losses, worth), by_cost=True)


@dataclass(frozen=True)
class Global(RankedWithinBudget):
    """Take away the units of least worth, wherever they are, until the budget is met; then put back what still fits.

    Args:
        budget: What the model may cost.
        limits: Group name → (least, largest) share of its units that stays.
        multiple_of: What the counts are multiples of: one number, or kind or group name → number.
        scale: How scores of different groups are made comparable, as in `ranked_worth`; "none" where they are already.

    Raises:
        InvalidValueError: a limit, multiple or scale that is not allowed.
    """

    def _find(self, problem: Problem) -> Counts:
        worth = ranked_worth(problem.graph, problem.scores, self.scale)
        return problem.walk(partial(block_losses, worth), by_cost=False)
