"""What all allocations within a budget share; UniformWithin: the largest share of units in every group that meets one."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import get_args

from torch import Tensor

from sparsekit.allocation.limits import (
    Counts,
    Free,
    Liked,
    Limits,
    Multiples,
    check_limits,
    check_multiples,
    free_counts,
    least_counts,
    spread,
)
from sparsekit.allocation.shares import keep_count
from sparsekit.allocation.walk import Losses, Walk, Width
from sparsekit.allocation.worth import Scale
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.budget import Budget, BudgetError, format_cost
from sparsekit.measure.cost import CostModel

_UNUSED, _HELD = 0.02, 1 / 3
"""Of a budget, the part that rounding to what a device likes may leave, and the part that groups may hold because they cannot
go below a step: where narrow groups hold more, there is nothing left to choose, and accuracy suffers."""


@dataclass(frozen=True)
class Problem:
    """What a search for counts is given.

    Args:
        graph: The groups.
        scores: Group name → float (units,).
        cost: The costs.
        limits: Metric → absolute limit.
        free: The numbers of units that tied groups may keep.
    """

    graph: UnitGraph
    scores: Mapping[str, Tensor]
    cost: CostModel
    limits: Mapping[str, float]
    free: Free

    def fits(self, counts: Counts) -> bool:
        """Whether counts are within the budget."""
        costs = self.cost.costs(counts)
        return all(costs[name] <= limit for name, limit in self.limits.items())

    def check_reachable(self) -> None:
        """Raise unless the budget is met where every group keeps the least number of units that it may.

        Raises:
            BudgetError: it is not; the message has the least cost and the groups that hold it up.
        """
        counts = least_counts(self.free)
        if self.fits(counts):
            return
        least, dense = self.cost.costs(counts), self.cost.costs({name: g.size for name, g in self.graph.groups.items()})
        above = [name for name, limit in self.limits.items() if least[name] > limit]
        told = "; ".join(
            f"{name} ≤ {format_cost(name, self.limits[name])} was asked, and {format_cost(name, least[name])}"
            f" ({least[name] / dense[name]:.1%} of the dense model) is the least"
            for name in above
        )
        holders = []
        for groups, allowed in self.free.items():
            if allowed[0] > 1:
                one = self.cost.costs({**counts, **dict.fromkeys(groups, 1)})
                saved = max((least[name] - one[name]) / dense[name] for name in above)
                size = self.graph.groups[groups[0]].size
                holders.append((saved, f"{', '.join(groups)} (at least {allowed[0]} of {size})"))
        holders = sorted((each for each in holders if each[0] > 0), key=lambda item: -item[0])[:5]
        because = (
            f"held up by {', '.join(text for _, text in holders)}, which limits or multiples keep wide: lower these"
            if holders
            else "every group is at its last unit there, and the rest is in fixed units, the output layer and what was kept"
        )
        raise BudgetError(f"the budget cannot be met: {told}; {because}. Ask for the least or more", least)

    def _walk(self, counts: Counts, losses: Losses) -> Walk:
        widths = [Width(groups, allowed, tuple(losses(groups, allowed))) for groups, allowed in self.free.items()]
        places = [width.counts.index(counts[width.groups[0]]) for width in widths]
        return Walk(widths, places, self.cost.tracker(counts, tuple(self.limits)), self.limits)

    def walk(self, losses: Losses, *, by_cost: bool) -> Counts:
        """Walk from the largest counts to the budget, by what blocks lose for their cost or for a unit; then fill."""
        walk = self._walk(spread(self.free, lambda _, counts: counts[-1]), losses)
        walk.down(by_cost=by_cost)
        walk.fill()
        walk.tighten()
        return walk.counts()

    def fill(self, counts: Counts, losses: Losses, *, tight: bool = True) -> Counts:
        """Put back what still fits into counts that are within the budget, the most worth for its cost first.

        `tight` then takes units from one group for others where much of the budget is left, which may cost worth.
        """
        walk = self._walk(counts, losses)
        walk.fill()
        if tight:
            walk.tighten()
        return walk.counts()

    def least_that_fits(self, at: Callable[[float], Counts]) -> Counts:
        """Bisect a path from the largest counts, `at(0)`, to the least, `at(1)`: the first counts on it that fit."""
        low, high = 0.0, 1.0
        best = at(0.0)
        if self.fits(best):
            return best
        best = at(1.0)
        for _ in range(48):
            middle = (low + high) / 2
            found = at(middle)
            if self.fits(found):
                best, high = found, middle
            else:
                low = middle
        return best


class WithinBudget(ABC):
    """An allocation that looks for numbers of units within a budget."""

    budget: Budget
    limits: Limits
    multiple_of: Multiples

    def __post_init__(self) -> None:
        check_limits(self.limits)
        check_multiples(self.multiple_of)

    def counts(self, graph: UnitGraph, scores: Mapping[str, Tensor], cost: CostModel | None = None) -> Mapping[str, int]:
        """Find the numbers, never more than the budget; `cost` is needed, and not every allocation looks at the scores.

        Raises:
            BudgetError: the budget cannot be met; the message has the least cost and what holds it up.
            InvalidValueError: no cost model, or scores that hold NaN.
        """
        if cost is None:
            raise InvalidValueError(
                f"{type(self).__name__} needs costs to meet its budget;"
                " pass cost=sparsekit.cost_model(model, *inputs, graph=graph)"
            )
        dense = cost.costs({name: group.size for name, group in graph.groups.items()})
        problem = Problem(graph, scores, cost, self.budget.limits(dense), free_counts(graph, self.limits, self.multiple_of))
        if not isinstance(self.multiple_of, Liked):
            return self._solve(problem)

        def unused(counts: Counts) -> float:
            costs = cost.costs(counts)
            return min(1 - costs[name] / max(min(limit, dense[name]), 1e-300) for name, limit in problem.limits.items())

        plain = replace(problem, free=free_counts(graph, self.limits, 1))
        low = cost.costs(least_counts(plain.free))
        found: list[Counts] = []
        step = self.multiple_of.step
        while step > 1:
            rounded = replace(problem, free=free_counts(graph, self.limits, Liked(step)))
            least = cost.costs(least_counts(rounded.free))
            if all(least[name] - low[name] <= _HELD * (limit - low[name]) for name, limit in problem.limits.items()):
                found.append(self._solve(rounded))
                if unused(found[-1]) <= _UNUSED:
                    return found[-1]
            step //= 2
        return min([*found, self._solve(plain)], key=unused)

    def _solve(self, problem: Problem) -> Counts:
        problem.check_reachable()
        for slack in (0.0, 1e-9, 1e-6, 1e-3):  # a tracker adds up floats; the exact costs decide
            found = self._find(replace(problem, limits={name: limit * (1 - slack) for name, limit in problem.limits.items()}))
            if problem.fits(found):
                return found
        return least_counts(problem.free)

    @abstractmethod
    def _find(self, problem: Problem) -> Counts:
        """Look for numbers, over those that limits and multiples allow."""


@dataclass(frozen=True)
class RankedWithinBudget(WithinBudget):
    """The same, for allocations that compare units of different groups: `scale` makes their scores comparable."""

    budget: Budget
    limits: Limits = field(default_factory=dict)
    multiple_of: Multiples = 1
    scale: Scale = "share_of_remaining"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale not in get_args(Scale):
            raise InvalidValueError(f"scale must be one of {', '.join(get_args(Scale))}, got {self.scale!r}")


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

    budget: Budget
    limits: Limits = field(default_factory=dict)
    multiple_of: Multiples = 1

    def _find(self, problem: Problem) -> Counts:
        def at(cut: float) -> Counts:
            def pick(groups: tuple[str, ...], counts: tuple[int, ...]) -> int:
                wanted = keep_count(max(1 - cut, 1e-9), problem.graph.groups[groups[0]].size)
                return counts[max(0, bisect_right(counts, wanted) - 1)]

            return spread(problem.free, pick)

        return problem.least_that_fits(at)
