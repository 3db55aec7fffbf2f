"""The walk to a budget: take away the block that costs the least worth for what it saves, until the budget is met."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from sparsekit.allocation.limits import Limits
from sparsekit.allocation.rounding import Liked, Multiples, free_counts
from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.budget import Budget, BudgetError, format_cost
from sparsekit.measure.cost import CostModel
from sparsekit.measure.tracker import CostTracker

Counts: TypeAlias = Mapping[str, int]
"""Group name → number of units kept, for every group."""

Losses: TypeAlias = Callable[[tuple[str, ...], Sequence[int]], Sequence[float]]
"""Tied groups and their counts, ascending → what is lost from each count to the one before it; 0 at place 0."""


@dataclass(frozen=True)
class Width:
    """Groups that keep equally many units, and the numbers that they may keep.

    Args:
        groups: Names.
        counts: Ascending.
        losses: What is lost from `counts[i]` to `counts[i - 1]`, at place i.
    """

    groups: tuple[str, ...]
    counts: tuple[int, ...]
    losses: tuple[float, ...]


def widths_of(free: Mapping[tuple[str, ...], Sequence[int]], losses: Losses) -> list[Width]:
    """The widths with what their steps lose."""
    return [Width(groups, tuple(counts), tuple(losses(groups, counts))) for groups, counts in free.items()]


def spread(
    free: Mapping[tuple[str, ...], Sequence[int]], at: Callable[[tuple[str, ...], Sequence[int]], int]
) -> dict[str, int]:
    """Group name → the count that `at` picks for its tied groups."""
    return {name: at(groups, counts) for groups, counts in free.items() for name in groups}


def fits(costs: Mapping[str, float], limits: Mapping[str, float]) -> bool:
    """Whether no limit is exceeded."""
    return all(costs[name] <= limit for name, limit in limits.items())


def dense_counts(free: Mapping[tuple[str, ...], Sequence[int]]) -> dict[str, int]:
    """The largest number of units that every group may keep."""
    return spread(free, lambda _, counts: counts[-1])


def check_reachable(
    free: Mapping[tuple[str, ...], Sequence[int]],
    cost: CostModel,
    sizes: Mapping[str, int],
    limits: Mapping[str, float],
) -> None:
    """Raise unless the budget is met where every group keeps the least number of units that it may.

    Args:
        free: Numbers of units by tied groups.
        cost: The costs.
        sizes: Group name → units of the dense model.
        limits: The budget in absolute numbers.

    Raises:
        BudgetError: it is not; the message has the least cost and the groups that hold it up.
    """
    counts = spread(free, lambda _, allowed: allowed[0])
    least = cost.costs(counts)
    if fits(least, limits):
        return
    dense = cost.costs(sizes)
    above = [name for name, limit in limits.items() if least[name] > limit]
    told = "; ".join(
        f"{name} ≤ {format_cost(name, limits[name])} was asked, and {format_cost(name, least[name])}"
        f" ({least[name] / dense[name]:.1%} of the dense model) is the least"
        for name in above
    )
    holders = []
    for groups, allowed in free.items():
        held = [name for name in groups if allowed[0] > 1]
        if held:
            one = cost.costs({**counts, **dict.fromkeys(groups, 1)})
            saved = max((least[name] - one[name]) / dense[name] for name in above)
            holders.append((saved, f"{', '.join(groups)} (at least {allowed[0]} of {sizes[groups[0]]})"))
    holders = sorted(((saved, text) for saved, text in holders if saved > 0), key=lambda item: -item[0])[:5]
    because = (
        f"held up by {', '.join(text for _, text in holders)}, which limits or multiples keep wide: lower these"
        if holders
        else "every group is at its last unit there, and the rest is in fixed units, the output layer and what was kept"
    )
    raise BudgetError(f"the budget cannot be met: {told}; {because}. Ask for the least or more", least)


def walk_to_budget(
    widths: Sequence[Width],
    tracker: CostTracker,
    limits: Mapping[str, float],
    *,
    by_cost: bool,
) -> dict[str, int]:
    """Take blocks away until the limits are met, then put back what still fits.

    Args:
        widths: Where blocks can be taken from.
        tracker: At the largest counts; moved along.
        limits: Metric → absolute limit, reachable.
        by_cost: Rank blocks by what they lose for what they save; else by what they lose for a unit.

    Returns:
        Group name → units kept.
    """
    places = [len(width.counts) - 1 for width in widths]
    heap: list[tuple[float, float, int, int]] = []

    def priority(number: int) -> float | None:
        """What the next block of a width loses for what it saves now; None if it saves nothing."""
        width, place = widths[number], places[number]
        saved = tracker.gain(width.groups, width.counts[place - 1], limits)
        if saved <= 0:
            return None
        if by_cost:
            return width.losses[place] / saved
        return width.losses[place] / ((width.counts[place] - width.counts[place - 1]) * len(width.groups))

    def push(number: int) -> None:
        if places[number] > 0 and (rank := priority(number)) is not None:
            taken = 1 - places[number] / max(1, len(widths[number].counts) - 1)
            heapq.heappush(heap, (rank, taken, number, places[number]))

    for number in range(len(widths)):
        push(number)
    while not fits(tracker.totals(), limits):
        if not heap:
            number = _largest_drop(widths, places, tracker, limits)
        else:
            rank, taken, number, place = heapq.heappop(heap)
            if place != places[number]:
                continue
            now = priority(number)
            if now is None:
                continue
            if now > rank and heap and (now, taken, number, place) > heap[0]:  # costs have changed since: look again later
                heapq.heappush(heap, (now, taken, number, place))
                continue
        places[number] -= 1
        tracker.move(widths[number].groups, widths[number].counts[places[number]])
        push(number)
    _fill(widths, places, tracker, limits)
    tighten(widths, places, tracker, limits)
    return {name: width.counts[place] for width, place in zip(widths, places) for name in width.groups}


def _largest_drop(widths: Sequence[Width], places: Sequence[int], tracker: CostTracker, limits: Mapping[str, float]) -> int:
    """The width that saves most when it goes down all the way: a table of times may be flat at the next step."""
    drops = [
        (tracker.gain(width.groups, width.counts[0], limits), -number)
        for number, (width, place) in enumerate(zip(widths, places))
        if place > 0
    ]
    if not drops:
        raise BudgetError("the budget cannot be met: every group is at its least number of units")
    return -max(drops)[1]


def _fill(
    widths: Sequence[Width], places: list[int], tracker: CostTracker, limits: Mapping[str, float], without: int | None = None
) -> None:
    """Put blocks back, the most worth for its cost first, as long as one fits; none of the width number `without`."""
    open_ = {number for number, width in enumerate(widths) if places[number] < len(width.counts) - 1 and number != without}
    while open_:
        totals = tracker.totals()
        best: tuple[float, int] | None = None
        for number in sorted(open_):
            width, place = widths[number], places[number]
            change = tracker.change(width.groups, width.counts[place + 1])
            # What does not fit now never will: costs only grow from here on.
            if any(totals[name] + change[name] > limit for name, limit in limits.items()):
                open_.discard(number)
                continue
            share = sum(change[name] / max(limit, 1e-300) for name, limit in limits.items())
            worth = width.losses[place + 1] / share if share > 0 else float("inf")
            if best is None or worth > best[0]:
                best = worth, number
        if best is None:
            return
        number = best[1]
        places[number] += 1
        tracker.move(widths[number].groups, widths[number].counts[places[number]])
        if places[number] == len(widths[number].counts) - 1:
            open_.discard(number)


_SLACK, _NARROW, _DOWN = 0.005, 100, (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
"""The part of a budget that is worth a search, the largest number of widths that it is made for, and numbers of blocks that
may be taken from one of them."""


def tighten(widths: Sequence[Width], places: list[int], tracker: CostTracker, limits: Mapping[str, float]) -> None:
    """Where one more unit of anything is too much and yet much of the budget is left, take a few from one group for others.

    Of a small network one channel may cost a tenth of the budget; three channels less of one layer may let another keep
    eight more. Of numbers that leave hardly anything those with most worth are taken; where none do, those that leave least.

    Args:
        widths: All of them.
        places: Which of its counts each width has; changed.
        tracker: At these counts; moved along.
        limits: Metric → absolute limit, which nothing found here exceeds.
    """
    if len(widths) > _NARROW:
        return

    def slack() -> float:
        totals = tracker.totals()
        return min((limit - totals[name]) / max(limit, 1e-300) for name, limit in limits.items())

    kept = [list(accumulate(width.losses)) for width in widths]

    def rank() -> tuple[bool, float]:
        left = slack()
        near = left <= _SLACK
        return near, sum(each[place] for each, place in zip(kept, places)) if near else -left

    def go(wanted: Sequence[int]) -> None:
        for number, (width, place) in enumerate(zip(widths, wanted)):
            if places[number] != place:
                places[number] = place
                tracker.move(width.groups, width.counts[place])

    for _ in range(4):
        start, reached = list(places), rank()
        if reached[0] or all(place == len(width.counts) - 1 for width, place in zip(widths, places)):
            return
        best: list[int] | None = None
        for number, place in enumerate(start):
            for down in (blocks for blocks in _DOWN if blocks <= place):
                go([*start[:number], place - down, *start[number + 1 :]])
                _fill(widths, places, tracker, limits, without=number)
                if (found := rank()) > reached:
                    best, reached = list(places), found
                go(start)
        if best is None:
            return
        go(best)
        _fill(widths, places, tracker, limits)


_UNUSED, _HELD = 0.02, 1 / 3
"""Of a budget, the part that rounding to what a device likes may leave, and the part that groups may hold because they cannot
go below a step: where narrow groups hold more, there is nothing left to choose, and accuracy suffers."""


def within_budget(
    graph: UnitGraph, cost: CostModel, budget: Budget, limits: Limits, multiple_of: Multiples, find: Search
) -> Counts:
    """Let `find` look for counts, and make sure that they are within the budget by the exact costs.

    Args:
        graph: The groups.
        cost: The costs.
        budget: What was asked.
        limits: Least and largest share by group name.
        multiple_of: What the counts are multiples of.
        find: The search, over numbers of units that limits and multiples allow.

    Raises:
        BudgetError: the budget cannot be met.
    """
    free = free_counts(graph, limits, multiple_of)
    if not isinstance(multiple_of, Liked) or multiple_of.step == 1:
        return _within(graph, cost, budget, free, find)
    dense = cost.costs({name: group.size for name, group in graph.groups.items()})
    least, plain = (cost.costs(spread(each, lambda _, allowed: allowed[0])) for each in (free, free_counts(graph, limits, 1)))
    absolute = budget.limits(dense)
    free_rein = all(least[name] - plain[name] <= _HELD * (limit - plain[name]) for name, limit in absolute.items())
    rounded = _within(graph, cost, budget, free, find) if free_rein else None
    if rounded is not None and _unused(cost.costs(rounded), dense, absolute) <= _UNUSED:
        return rounded
    finer = within_budget(graph, cost, budget, limits, Liked(multiple_of.step // 2), find)
    if rounded is None:
        return finer
    return min(rounded, finer, key=lambda counts: _unused(cost.costs(counts), dense, absolute))


def _unused(costs: Mapping[str, float], dense: Mapping[str, float], limits: Mapping[str, float]) -> float:
    """The part of the budget that is left, of what the dense model could use."""
    return min(1 - costs[name] / max(min(limit, dense[name]), 1e-300) for name, limit in limits.items())


def _within(
    graph: UnitGraph, cost: CostModel, budget: Budget, free: Mapping[tuple[str, ...], tuple[int, ...]], find: Search
) -> Counts:
    sizes = {name: group.size for name, group in graph.groups.items()}
    absolute = budget.limits(cost.costs(sizes))
    check_reachable(free, cost, sizes, absolute)
    for slack in (0.0, 1e-9, 1e-6, 1e-3):  # a tracker adds up floats; the exact costs decide
        found = find(Problem(free, {name: limit * (1 - slack) for name, limit in absolute.items()}, cost, budget))
        if fits(cost.costs(found), absolute):
            return found
    return spread(free, lambda _, allowed: allowed[0])


@dataclass(frozen=True)
class Problem:
    """What a search for counts is given.

    Args:
        free: Tied groups → the numbers of units that they may keep, ascending.
        limits: Metric → absolute limit.
        cost: The costs.
        budget: What was asked, of which `limits` are the numbers.
    """

    free: Mapping[tuple[str, ...], tuple[int, ...]]
    limits: Mapping[str, float]
    cost: CostModel
    budget: Budget

    def fits(self, counts: Counts) -> bool:
        """Whether counts are within the budget."""
        return fits(self.cost.costs(counts), self.limits)

    def fill(self, counts: Counts, losses: Losses, *, tight: bool = True) -> dict[str, int]:
        """Put back what still fits into counts that are within the budget, the most worth for its cost first.

        Args:
            counts: What is kept.
            losses: Worth of what would be dropped.
            tight: Then take units from one group for others where much of the budget is left, which may cost worth.
        """
        widths = widths_of(self.free, losses)
        places = [width.counts.index(counts[width.groups[0]]) for width in widths]
        tracker = self.cost.tracker(counts, self.budget.metrics)
        _fill(widths, places, tracker, self.limits)
        if tight:
            tighten(widths, places, tracker, self.limits)
        return {name: width.counts[place] for width, place in zip(widths, places) for name in width.groups}

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

    def walk(self, losses: Losses, *, by_cost: bool) -> dict[str, int]:
        """`walk_to_budget` from the largest counts."""
        tracker = self.cost.tracker(dense_counts(self.free), self.budget.metrics)
        return walk_to_budget(widths_of(self.free, losses), tracker, self.limits, by_cost=by_cost)


Search: TypeAlias = Callable[[Problem], Counts]
"""How numbers of units are looked for."""
