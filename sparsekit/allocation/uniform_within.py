"""UniformWithin: the same share of units in every group, the largest that meets a budget."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sparsekit.allocation.uniform import keep_count
from sparsekit.allocation.walk import Counts, Problem, Search, spread
from sparsekit.allocation.within_budget import WithinBudget
from sparsekit.graph.graph import UnitGraph


@dataclass(frozen=True)
class UniformWithin(WithinBudget):
    """The largest ratio at which max(1, ⌈ratio · size⌉) units of each group meet the budget, rounded down to multiples.

    Nothing is put back afterwards, so that layers of one kind keep one width: what a configuration file can say.

    Args:
        budget: What the model may cost.
        limits: Group name → (least, largest) share of its units that stays.
        multiple_of: What the counts are multiples of: one number, or kind or group name → number.

    Raises:
        InvalidValueError: a limit or multiple that is not allowed.
    """

    def _search(
        self,
        graph: UnitGraph,
        scores: Mapping[str, Tensor],  # noqa: ARG002 - the units of least worth go, however many
    ) -> Search:
        def find(problem: Problem) -> Counts:
            def at(cut: float) -> Counts:
                return spread(
                    problem.free,
                    lambda groups, counts: counts[
                        max(0, bisect_right(counts, keep_count(max(1 - cut, 1e-9), graph.groups[groups[0]].size)) - 1)
                    ],
                )

            return problem.least_that_fits(at)

        return find
