"""Global: one ranking of all units of the model, whatever they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sparsekit.allocation.walk import Search
from sparsekit.allocation.within_budget import RankedWithinBudget
from sparsekit.allocation.worth import block_losses, ranked_worth
from sparsekit.graph.graph import UnitGraph


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

    def _search(self, graph: UnitGraph, scores: Mapping[str, Tensor]) -> Search:
        worth = ranked_worth(graph, scores, self.scale)
        return lambda problem: problem.walk(lambda groups, counts: block_losses(worth, groups, counts), by_cost=False)
