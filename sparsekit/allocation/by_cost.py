"""by_cost(), by_loss() and global_ranking(): remove the least important units first, per cost or overall."""

import heapq
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsekit.allocation.limits import Counts, spread
from sparsekit.allocation.problem import Problem
from sparsekit.criteria.base import check_scores, refuse_nan
from sparsekit.errors import InvalidValueError
from sparsekit.graph import UnitGraph
from sparsekit.measure import BudgetError

Scale = Literal["relative", "none"]
"""How scores of different groups are made comparable.

"relative" takes s² / Σ s² over the units of the group that remain when the unit is removed (as LAMP does for weights), times
the number of layers that produce the units. "none" compares scores directly.
"""

_HUGE = 1e30
_SLACK, _NARROW, _DOWN = 0.005, 100, (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
"""Unused share of a budget above which a local search is made, the largest number of widths for it, and the numbers of blocks
of units that it tries to remove from one width."""


def by_cost(problem: Problem, *, scale: Scale = "relative", width_penalty: float = 1.0) -> Counts:
    """Remove the unit with the lowest importance per saved cost, again and again, until the budget is met.

    The saving of a unit is exact and computed at the current widths: the fewer channels a layer has, the less one more input
    channel costs. At the end, units that still fit are put back. With several limits, the saving is the sum over the limits
    that are still exceeded, each as a share of its limit.

    Args:
        problem: Groups, scores, costs and budget.
        scale: How scores of different groups are made comparable, see `Scale`; "none" if they are already.
        width_penalty: Power of (size of the group / units that stay) that raises the importance of a unit if few stay. With
            0, a group may keep three units of 32, since each alone mattered little while the others were there. Use 2 if the
            network trains further.

    Raises:
        InvalidValueError: no budget, or a scale or width_penalty that is not allowed.

    Source: Liu et al., Group Fisher pruning, ICML 2021 (arXiv 2108.00708), for scores by cost.
    """
    problem.require_budget("by_cost")
    if not 0.0 <= width_penalty < math.inf:
        raise InvalidValueError(f"width_penalty must be a finite number >= 0, got {width_penalty}; 0 takes scores as they are")
    saliency = _ranked_saliency(problem.graph, problem.scores, scale)
    saliency = {name: own * (own.size / np.arange(1, own.size + 1)) ** width_penalty for name, own in saliency.items()}
    return _walk(problem, saliency, by_cost=True)


def by_loss(problem: Problem) -> Counts:
    """Remove units as `by_cost` does, without scaling the scores, which must estimate the rise of the loss without a unit.

    If the loss hardly depends on a layer, most of its units may be removed. Use it with `Fisher(per_position=True)`.
    """
    return by_cost(problem, scale="none")


def global_ranking(problem: Problem, *, scale: Scale = "relative") -> Counts:
    """Remove the least important units of the whole model until the budget is met; then put back units that still fit.

    Arguments and errors are as in `by_cost`.
    """
    problem.require_budget("global")
    return _walk(problem, _ranked_saliency(problem.graph, problem.scores, scale), by_cost=False)


def _ranked_saliency(graph: UnitGraph, scores: Mapping[str, Tensor], scale: Scale) -> dict[str, npt.NDArray[np.float64]]:
    """Return the importance of the units from the best of each group to its worst, at least 0 and comparable between groups.

    Source: Lee et al., Layer-adaptive sparsity for the magnitude-based pruning, ICLR 2021 (arXiv 2010.07611), for "relative",
        there for single weights.
    """
    if scale not in get_args(Scale):
        raise InvalidValueError(f"scale must be one of {', '.join(get_args(Scale))}, got {scale!r}")
    check_scores(graph, scores, "scores")
    given = {name: scores[name].detach().cpu().double().clamp(-_HUGE, _HUGE) for name in graph.groups}
    for name, values in given.items():
        refuse_nan(values, f"scores of group {name!r}")
    lowest = min((float(values.min().clamp_max(0.0)) for values in given.values()), default=0.0)
    saliency = {}
    for name, values in given.items():
        values = values - lowest if scale == "none" else _makers(graph, name) * share_of_remaining(values)
        saliency[name] = np.sort(values.numpy())[::-1]
    return saliency


def share_of_remaining(scores: Tensor) -> Tensor:
    """Return s² / Σ s² over the group's units that remain when the unit is removed, the worst first; float64 (units,).

    Scores of 3, 1 and 2 give 1, 1/14 and 4/13. Of equal units, the higher index goes first. If scores are negative, the least
    of them counts as 0; if all are 0, the units are equal.
    """
    values = scores.detach().double()
    order = torch.sort(values, descending=True, stable=True).indices
    ranked = values[order]
    ranked = ranked - ranked[-1].clamp_max(0.0)
    ranked = ranked / ranked[0] if ranked[0] > 0 else torch.ones_like(ranked)
    return torch.empty_like(values).index_copy_(0, order, ranked.square() / ranked.square().cumsum(0))


def _makers(graph: UnitGraph, group: str) -> int:
    """Return the number of layers that produce the units: to narrow a residual stream of four blocks, all four are narrowed."""
    made = {piece.name for piece in graph.groups[group].slices if piece.side == "out" and len(graph.shapes[piece.name]) > 1}
    return max(1, len(made))


def _walk(problem: Problem, importance: Mapping[str, npt.NDArray[np.float64]], *, by_cost: bool) -> Counts:
    """Start at the largest counts, remove units by importance per cost or per unit until the budget is met; then fill.

    `importance` is group name → float64 (units,), from the best unit to the worst.
    """
    walk = _Walk(problem, importance)
    walk.down(by_cost=by_cost)
    walk.fill()
    walk.tighten()
    return walk.counts()


class _Width(NamedTuple):
    """Groups that keep equally many units, their allowed numbers, ascending, and the importance lost by each step down.

    The first loss is 0.
    """

    groups: tuple[str, ...]
    counts: tuple[int, ...]
    losses: tuple[float, ...]


class _Walk:
    """Reduces and restores widths by blocks of units, and tracks their costs.

    A block is the units between two successive allowed counts. `places` has, for each width, the index of its count.
    """

    def __init__(self, problem: Problem, importance: Mapping[str, npt.NDArray[np.float64]]) -> None:
        self.widths: list[_Width] = []
        for groups, allowed in problem.free.items():
            blocks = (sum(importance[name][fewer:more].sum() for name in groups) for fewer, more in pairwise(allowed))
            self.widths.append(_Width(groups, allowed, (0.0, *map(float, blocks))))
        self.places, self.limits = [len(width.counts) - 1 for width in self.widths], problem.limits
        largest = spread(problem.free, lambda _, counts: counts[-1])
        self.tracker = problem.costs.tracker(largest, tuple(problem.limits))

    def counts(self) -> dict[str, int]:
        return {name: width.counts[place] for width, place in zip(self.widths, self.places) for name in width.groups}

    def _go(self, number: int, place: int) -> None:
        if self.places[number] != place:
            self.places[number] = place
            self.tracker.move(self.widths[number].groups, self.widths[number].counts[place])

    def down(self, *, by_cost: bool) -> None:
        """Remove the blocks with the least loss per saved cost, or per unit, until the limits are met."""
        heap: list[tuple[float, float, int, int]] = []

        def priority(number: int) -> float | None:
            """Return the loss per saving of the next block of a width; None if it saves nothing."""
            width, place = self.widths[number], self.places[number]
            saved = self.tracker.gain(width.groups, width.counts[place - 1], self.limits)
            if saved <= 0:
                return None
            if by_cost:
                return width.losses[place] / saved
            return width.losses[place] / ((width.counts[place] - width.counts[place - 1]) * len(width.groups))

        def push(number: int) -> None:
            place = self.places[number]
            if place > 0 and (rank := priority(number)) is not None:
                taken = 1 - place / max(1, len(self.widths[number].counts) - 1)
                heapq.heappush(heap, (rank, taken, number, place))

        for number in range(len(self.widths)):
            push(number)
        while (totals := self.tracker.totals()) and any(totals[name] > limit for name, limit in self.limits.items()):
            if not heap:
                raise BudgetError("the budget cannot be met: every group is at its least number of units")
            rank, taken, number, place = heapq.heappop(heap)
            if place != self.places[number]:
                continue
            now = priority(number)
            if now is None:
                continue
            if now > rank and heap and (now, taken, number, place) > heap[0]:  # costs have changed since it was pushed
                heapq.heappush(heap, (now, taken, number, place))
                continue
            self._go(number, self.places[number] - 1)
            push(number)

    def fill(self, without: int | None = None) -> None:
        """Put blocks back while one fits, the most important per cost first, except in the width with index `without`."""
        widths, places = self.widths, self.places
        left = [number for number, width in enumerate(widths) if places[number] < len(width.counts) - 1 and number != without]
        while left:
            totals = self.tracker.totals()
            fitting: list[tuple[float, int]] = []
            for number in left:
                width, place = widths[number], places[number]
                change = self.tracker.change(width.groups, width.counts[place + 1])
                if any(totals[name] + change[name] > limit for name, limit in self.limits.items()):
                    continue
                share = sum(change[name] / max(limit, 1e-300) for name, limit in self.limits.items())
                fitting.append((width.losses[place + 1] / share if share > 0 else float("inf"), -number))
            if not fitting:
                return
            best = -max(fitting)[1]
            self._go(best, places[best] + 1)
            # Widths that do not fit now never will: costs only grow from here on.
            left = [-n for _, n in fitting if places[-n] < len(widths[-n].counts) - 1]

    def tighten(self) -> None:
        """If no further unit fits and much of the budget is unused, exchange units of one group for units of others.

        In a small network, one channel may cost a tenth of the budget, and three channels less of one layer may let another
        keep eight more. Of the solutions that use almost all of the budget, the one with the most important units is chosen; if
        there are none, the one that leaves least unused.
        """
        if len(self.widths) > _NARROW:
            return
        kept = [list(accumulate(width.losses)) for width in self.widths]

        def rank() -> tuple[bool, float]:
            totals = self.tracker.totals()
            left = min((limit - totals[name]) / max(limit, 1e-300) for name, limit in self.limits.items())
            near = left <= _SLACK
            return near, sum(each[place] for each, place in zip(kept, self.places)) if near else -left

        def go(wanted: Sequence[int]) -> None:
            for number, place in enumerate(wanted):
                self._go(number, place)

        for _ in range(4):
            start, reached = list(self.places), rank()
            if reached[0] or all(place == len(width.counts) - 1 for width, place in zip(self.widths, start)):
                return
            best: list[int] | None = None
            for number, place in enumerate(start):
                for down in (blocks for blocks in _DOWN if blocks <= place):
                    self._go(number, place - down)
                    self.fill(without=number)
                    if (found := rank()) > reached:
                        best, reached = list(self.places), found
                    go(start)
            if best is None:
                return
            go(best)
            self.fill()
