"""Global: one ranking of all units of the model, whatever they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from sparsekit.allocation.base import CostModel, needed
from sparsekit.allocation.limits import Limits, check_limits
from sparsekit.allocation.rounding import Multiples, check_multiples
from sparsekit.allocation.walk import within_budget
from sparsekit.allocation.worth import Scale, block_losses, check_scale, ranked_worth
from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.budget import Budget

__all__ = ["Global"]


@dataclass(frozen=True)
class Global:
    """Take away the units of least worth, wherever they are, until the budget is met; then put back what still fits.

    Args:
        budget: What the model may cost.
        limits: Group name → (least, largest) share of its units that stays.
        multiple_of: What the counts are multiples of: one number, or kind or group name → number.
        scale: How scores of different groups are made comparable, as in `ranked_worth`; "none" where they are already.

    Raises:
        InvalidValueError: a limit, multiple or scale that is not allowed.
    """

    budget: Budget
    limits: Limits = field(default_factory=dict)
    multiple_of: Multiples = 1
    scale: Scale = "rest"

    def __post_init__(self) -> None:
        check_limits(self.limits)
        check_multiples(self.multiple_of)
        check_scale(self.scale)

    def counts(self, graph: UnitGraph, scores: Mapping[str, Tensor], cost: CostModel | None = None) -> Mapping[str, int]:
        """Find the numbers.

        Args:
            graph: The groups; tied groups get equal numbers.
            scores: Group name → float (units,), larger stays.
            cost: What numbers cost; needed.

        Returns:
            Group name → number of units kept. Never more than the budget.

        Raises:
            BudgetError: the budget cannot be met.
            InvalidValueError: no cost model, or scores that hold NaN.
        """
        worth = ranked_worth(graph, scores, self.scale)
        return within_budget(
            graph,
            needed(cost, self),
            self.budget,
            self.limits,
            self.multiple_of,
            lambda problem: problem.walk(lambda groups, counts: block_losses(worth, groups, counts), by_cost=False),
        )
