"""WithinBudget and RankedWithinBudget: what all allocations within a budget share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from sparsekit.allocation.base import needed
from sparsekit.allocation.limits import Limits, check_limits
from sparsekit.allocation.rounding import Multiples, check_multiples
from sparsekit.allocation.walk import Search, within_budget
from sparsekit.allocation.worth import Scale, check_scale
from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.budget import Budget
from sparsekit.measure.cost import CostModel


@dataclass(frozen=True)
class WithinBudget(ABC):
    """An allocation that looks for numbers of units within a budget.

    Args:
        budget: What the model may cost.
        limits: Group name → (least, largest) share of its units that stays.
        multiple_of: What the counts are multiples of: one number, or kind or group name → number.

    Raises:
        InvalidValueError: a limit or multiple that is not allowed.
    """

    budget: Budget
    limits: Limits = field(default_factory=dict)
    multiple_of: Multiples = 1

    def __post_init__(self) -> None:
        check_limits(self.limits)
        check_multiples(self.multiple_of)

    def counts(self, graph: UnitGraph, scores: Mapping[str, Tensor], cost: CostModel | None = None) -> Mapping[str, int]:
        """Find the numbers, never more than the budget; `cost` is needed, and not every allocation looks at the scores.

        Raises:
            BudgetError: the budget cannot be met; the message has the least cost and what holds it up.
            InvalidValueError: no cost model, or scores that hold NaN.
        """
        search = self._search(graph, scores)
        return within_budget(graph, needed(cost, self), self.budget, self.limits, self.multiple_of, search)

    @abstractmethod
    def _search(self, graph: UnitGraph, scores: Mapping[str, Tensor]) -> Search:
        """How numbers are looked for, over those that limits and multiples allow."""


@dataclass(frozen=True)
class RankedWithinBudget(WithinBudget):
    """The same, for allocations that compare units of different groups.

    Args:
        budget: What the model may cost.
        limits: Group name → (least, largest) share of its units that stays.
        multiple_of: What the counts are multiples of: one number, or kind or group name → number.
        scale: How scores of different groups are made comparable, as in `ranked_worth`; "none" where they are already.

    Raises:
        InvalidValueError: a limit, multiple or scale that is not allowed.
    """

    scale: Scale = "share_of_remaining"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scale(self.scale)
