"""Knapsack: the numbers of units with the largest worth in all whose costs fit, as a dynamic programme."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from sparsekit.allocation.limits import Counts, Free, least_counts
from sparsekit.allocation.within_budget import Problem, RankedWithinBudget
from sparsekit.allocation.worth import block_losses, ranked_worth

_BINS, _PASSES, _CHOICES = 2048, 6, 33
"""Of a programme: steps of the budget, times it is solved anew, and numbers of units of a group to choose from, evenly spaced;
the rest of the budget is filled unit by unit."""


@dataclass(frozen=True)
class Knapsack(RankedWithinBudget):
    """Choose one number of units for every group so that the worth of what stays is largest within the budget.

    The groups are the items, their numbers of units the choices, so that the units of least worth go first in each. Costs of
    a group are taken with all others at their present numbers; the programme is solved again with those that it has found,
    since a layer is cheaper where its neighbours are narrow, and the best numbers that fit are kept. Made for latencies, whose
    steps a walk unit by unit cannot see over. With several budgets the costs are added up as shares of their limits.

    Args:
        budget: What the model may cost.
        limits: Group name → (least, largest) share of its units that stays.
        multiple_of: What the counts are multiples of: one number, or kind or group name → number.
        scale: How scores of different groups are made comparable, as in `ranked_worth`.

    Raises:
        InvalidValueError: a limit, multiple or scale that is not allowed.

    Source: Shen et al., Structural pruning via latency-saliency knapsack, NeurIPS 2022 (arXiv 2210.06659), for the problem; the
    programme here is a multiple-choice knapsack solved anew around each solution.
    """

    def _find(self, problem: Problem) -> Counts:
        worth = ranked_worth(problem.graph, problem.scores, self.scale)
        losses = partial(block_losses, worth)

        def kept(counts: Counts) -> float:
            return float(sum(worth[name][:count].sum() for name, count in counts.items()))

        chosen = {groups: _evenly(counts) for groups, counts in problem.free.items()}
        values = {groups: np.cumsum(losses(groups, counts)) for groups, counts in chosen.items()}
        # From the walk, which fits; every solution that fits and is worth more takes its place.
        best = around = problem.walk(losses, by_cost=True)
        capacity = 1.0
        for _ in range(_PASSES):
            found = _solve(problem, chosen, values, around, capacity)
            if problem.fits(found):
                best = max(best, problem.fill(found, losses, tight=False), key=kept)
            else:  # costs around these numbers are others than they were taken for
                total = problem.cost.costs(found)
                capacity *= min(limit / total[name] for name, limit in problem.limits.items())
            if found == around:
                break
            around = found
        return best


def _evenly(counts: tuple[int, ...]) -> tuple[int, ...]:
    """The first, the last and others between."""
    if len(counts) <= _CHOICES:
        return counts
    return tuple(counts[round(place)] for place in np.linspace(0, len(counts) - 1, _CHOICES))


def _solve(
    problem: Problem,
    chosen: Free,
    values: Mapping[tuple[str, ...], npt.NDArray[np.float64]],
    around: Counts,
    capacity: float,
) -> Counts:
    """The largest worth by costs that add up, each taken with the other groups at `around`.

    Weights are rounded up to whole bins, so that a solution never exceeds the capacity by these costs.
    """
    limits = problem.limits
    tracker = problem.cost.tracker(around, tuple(limits))
    totals = tracker.totals()

    def weight(change: Mapping[str, float]) -> float:
        return sum(change[name] / limit for name, limit in limits.items()) / len(limits)

    weights = {
        groups: np.maximum.accumulate([weight(tracker.change(groups, count)) for count in counts])
        for groups, counts in chosen.items()
    }
    # What remains when every group is at its least number; the lowest weight of each counts as nothing from here on.
    spent = sum(totals[name] / limit for name, limit in limits.items()) / len(limits)
    spent += sum(float(each[0]) for each in weights.values())
    room = capacity - spent
    if room <= 0:
        return least_counts(problem.free)
    best = np.zeros(_BINS + 1)
    picks: list[tuple[tuple[str, ...], npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
    for groups, each in weights.items():
        bins = np.ceil((each - each[0]) / room * _BINS - 1e-9).astype(np.int64)
        table = np.full((len(bins), _BINS + 1), -np.inf)
        for place, needed_bins in enumerate(bins):
            if needed_bins <= _BINS:
                table[place, needed_bins:] = best[: _BINS + 1 - needed_bins] + values[groups][place]
        pick = table.argmax(0)
        best = table.max(0)
        picks.append((groups, pick, bins))
    found: dict[str, int] = {}
    left = _BINS
    for groups, pick, bins in reversed(picks):
        place = int(pick[left])
        found.update(dict.fromkeys(groups, chosen[groups][place]))
        left -= int(bins[place])
    return found
