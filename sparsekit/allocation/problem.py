"""Problem and allocate(): numbers of units within a budget, with limits and multiples; Schedule: steps towards it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor

from sparsekit.allocation.limits import (
    Counts,
    Free,
    Limits,
    Multiples,
    PreferredMultiple,
    check_multiples,
    free_counts,
    least_counts,
)
from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit.graph import UnitGraph
from sparsekit.measure import Budget, BudgetError, CostModel, format_cost

_UNUSED, _HELD = 0.02, 1 / 3
"""The share of a budget that preferred multiples may leave unused, and the share of the budget beyond the smallest possible
model that they may add to the minimum. If they add more, hardly any choice is left, and accuracy suffers."""


@dataclass(frozen=True)
class Problem:
    """The input of an allocation, which decides how many units each group keeps.

    Args:
        graph: Unit graph with the groups.
        scores: Group name → float (units,), larger stays.
        costs: The cost model of the graph.
        limits: Metric → absolute limit; empty without a budget.
        free: Tied groups → the numbers of units that they may keep, ascending.
        budget: The budget as it was given, for messages.
    """

    graph: UnitGraph
    scores: Mapping[str, Tensor]
    costs: CostModel
    limits: Mapping[str, float]
    free: Free
    budget: Budget | None = None

    def fits(self, counts: Counts) -> bool:
        """Return whether counts are within the budget."""
        costs = self.costs.costs(counts)
        return all(costs[name] <= limit for name, limit in self.limits.items())

    def require_budget(self, allocation: str) -> None:
        """Raise InvalidValueError without a budget."""
        if not self.limits:
            raise InvalidValueError(f'{allocation!r} needs a budget, as in budget=sparsekit.Budget(flops="50%")')

    def check_reachable(self) -> None:
        """Raise BudgetError, with the minimum and the groups that prevent less, if the smallest widths exceed the budget."""
        counts = least_counts(self.free)
        if self.fits(counts):
            return
        least, dense = self.costs.costs(counts), self.costs.dense_costs()
        above = {name: limit for name, limit in self.limits.items() if least[name] > limit}
        told = "; ".join(
            f"{name} ≤ {format_cost(name, limit) if self.budget is None else self.budget.told(name, limit)} was requested, and"
            f" {format_cost(name, least[name])} ({least[name] / dense[name]:.1%} of the dense model) is the minimum"
            for name, limit in above.items()
        )
        holders = []
        for groups, allowed in self.free.items():
            if allowed[0] > 1:
                one = self.costs.costs({**counts, **dict.fromkeys(groups, 1)})
                saved = max((least[name] - one[name]) / dense[name] for name in above)
                holders.append((saved, f"{', '.join(groups)} ({self._held(groups, allowed[0])})"))
        holders = sorted((each for each in holders if each[0] > 0), key=lambda item: -item[0])[:5]
        because = (
            f"held up by {', '.join(text for _, text in holders)}"
            if holders
            else "every group is at its last unit there; the rest is spent on layers that cannot be pruned, such as the output"
            " layer, and on what was kept"
        )
        asked = "" if self.budget is None else self.budget.question(*above)
        raise BudgetError(f"the budget cannot be met: {told}; {because}. Ask for the minimum or more.{asked}", least)

    def _held(self, groups: tuple[str, ...], least: int) -> str:
        """Return why some tied groups cannot keep fewer units than `least`."""
        found = [self.graph.groups[name] for name in groups]
        size, own = found[0].size, max(group.rounded(1) for group in found)
        if least > own and found[0].kind == "rank":
            return f"at least {least} of {size} ranks of an adapter, which stay unless limits={{'rank': (0, 1)}}"
        if least > own:
            return f"at least {least} of {size}, by limits or multiples: lower these"
        if any(group.multiple > 1 for group in found):
            return f"at least {least} of {size}, since its kernel takes multiples of {found[0].multiple}"
        return f"each token takes {least} of {size} experts" if found[0].kind == "expert" else f"at least {least} of {size}"


Allocation: TypeAlias = Callable[[Problem], Counts]
"""Returns how many units each group keeps: for every group, a number in `Problem.free`. `functools.partial` sets options."""


def allocate(
    allocation: Allocation,
    graph: UnitGraph,
    scores: Mapping[str, Tensor],
    costs: CostModel,
    *,
    budget: Budget | None = None,
    limits: Limits | None = None,
    multiple_of: Multiples = 1,
) -> Counts:
    """Decide how many units each group keeps.

    Args:
        allocation: The rule, such as `by_cost`.
        graph: Unit graph with the groups.
        scores: Group name → float (units,), larger stays.
        costs: The cost model of the graph.
        budget: Upper limits for the model; None for allocations that need none, such as `by_ratio`.
        limits: Group name → (least, largest) share of its units that stays.
        multiple_of: Divisor of the widths of layers, or kind or group name → divisor of the number of units. A
            `PreferredMultiple` is lowered if much of the budget would be unused.

    Returns:
        Group name → units kept, for every group.

    Raises:
        BudgetError: the budget cannot be met, with the minimum and the groups that prevent less; or the allocation exceeds it.
        InvalidValueError: a limit or multiple that is not allowed, no budget, or scores that hold NaN.
        UnknownNameError: a limit or a multiple names neither a group nor a kind.
    """
    limits = limits or {}
    check_multiples(multiple_of)
    dense = costs.dense_costs()
    absolute = {} if budget is None else budget.limits(dense)
    if "flops" in absolute and costs.free_weights:
        raise BudgetError(f"FLOPs cannot be limited: {costs.note}, or limit params or latency_ms instead")

    def solve(multiple_of: Multiples) -> Counts:
        return _solve(allocation, Problem(graph, scores, costs, absolute, free_counts(graph, limits, multiple_of), budget))

    if not isinstance(multiple_of, PreferredMultiple) or not absolute:
        return solve(multiple_of)

    def unused(counts: Counts) -> float:
        found = costs.costs(counts)
        return min(1 - found[name] / max(min(limit, dense[name]), 1e-300) for name, limit in absolute.items())

    low = costs.costs(least_counts(free_counts(graph, limits, 1)))
    tried: list[Counts] = []
    for step in multiple_of.steps:
        rounded = replace(multiple_of, step=step)
        least = costs.costs(least_counts(free_counts(graph, limits, rounded)))
        if all(least[name] - low[name] <= _HELD * (limit - low[name]) for name, limit in absolute.items()):
            tried.append(solve(rounded))
            if unused(tried[-1]) <= _UNUSED:
                return tried[-1]
    return min([*tried, solve(1)], key=unused)


def _solve(allocation: Allocation, problem: Problem) -> Counts:
    problem.check_reachable()
    counts: Counts = {}
    for slack in (0.0, 1e-9, 1e-6, 1e-3):  # trackers have rounding errors; the exact costs decide
        counts = allocation(replace(problem, limits={name: limit * (1 - slack) for name, limit in problem.limits.items()}))
        if problem.fits(counts):
            return counts
    costs = problem.costs.costs(counts)
    told = "; ".join(
        f"{name} ≤ {format_cost(name, limit)}, not {format_cost(name, costs[name])}"
        for name, limit in problem.limits.items()
        if costs[name] > limit
    )
    raise BudgetError(
        f"the allocation {name_of(allocation)!r} exceeds the budget: {told}; take an allocation within a budget, such as"
        " 'by_cost', let this one keep fewer units, or leave `budget` out"
    )


def name_of(allocation: Allocation) -> str:
    """Return the name of an allocation for messages and reports; a `functools.partial` has the name of its function."""
    plain = getattr(allocation, "func", allocation)
    return str(getattr(plain, "__name__", type(plain).__name__))


SHAPES: Mapping[str, Callable[[float], float]] = {
    "one_shot": lambda _: 1.0,
    "linear": lambda time: time,
    "cubic": lambda time: 1.0 - (1.0 - time) ** 3,
    "cosine": lambda time: 0.5 - 0.5 * math.cos(math.pi * time),
}
"""Name → progress in [0, 1] after a share of the time in (0, 1]."""


@dataclass(frozen=True)
class Schedule:
    """Progress over steps: from the dense model to the budget.

    "one_shot" removes everything in the first step, "linear" equal parts, "cubic" much at first and little at the end,
    "cosine" little at both ends.

    Args:
        shape: "one_shot", "linear", "cubic" or "cosine".
        steps: Number of steps after which the budget is met, at least 1.

    Raises:
        UnknownNameError: no such shape.
        InvalidValueError: fewer than one step.

    Source: Zhu and Gupta, To prune, or not to prune, 2017 (arXiv 1710.01878), for the cubic one.
    """

    shape: str = "one_shot"
    steps: int = 1

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise UnknownNameError(f"unknown schedule {self.shape!r}; {nearest(self.shape, SHAPES)}")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise InvalidValueError(f"a schedule needs at least one step, got steps={self.steps!r}")

    def progress(self, step: int) -> float:
        """Return the progress in [0, 1] after a number of steps: 0 before the first, 1 from the last one on."""
        if step <= 0:
            return 0.0
        return 1.0 if step >= self.steps else SHAPES[self.shape](step / self.steps)
