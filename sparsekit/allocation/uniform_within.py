"""UniformWithin: the same share of units in every group, the largest that meets a budget."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from sparsekit.allocation.base import CostModel, needed
from sparsekit.allocation.limits import Limits, check_limits
from sparsekit.allocation.rounding import Multiples, check_multiples
from sparsekit.allocation.uniform import keep_count
from sparsekit.allocation.walk import Counts, Problem, spread, within_budget
from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.budget import Budget

__all__ = ["UniformWithin"]


@dataclass(frozen=True)
class UniformWithin:
    """The largest ratio at which max(1, ⌈ratio · size⌉) units of each group meet the budget, rounded down to multiples.

    Nothing is put back afterwards, so that layers of one kind keep one width: what a configuration file can say.

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

    def counts(
        self,
        graph: UnitGraph,
        scores: Mapping[str, Tensor],  # noqa: ARG002 - the protocol's signature
        cost: CostModel | None = None,
    ) -> Mapping[str, int]:
        """Find the numbers.

        Args:
            graph: The groups; tied groups get equal numbers.
            scores: Not looked at.
            cost: What numbers cost; needed.

        Returns:
            Group name → number of units kept. Never more than the budget.

        Raises:
            BudgetError: the budget cannot be met.
            InvalidValueError: no cost model.
        """

        def find(problem: Problem) -> Counts:
            def at(cut: float) -> Counts:
                return spread(
                    problem.free,
                    lambda groups, counts: counts[
                        max(0, bisect_right(counts, keep_count(max(1 - cut, 1e-9), graph.groups[groups[0]].size)) - 1)
                    ],
                )

            return problem.least_that_fits(at)

        return within_budget(graph, needed(cost, self), self.budget, self.limits, self.multiple_of, find)
