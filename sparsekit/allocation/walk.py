"""Walk: remove the block of units with the least importance per cost that it saves, until the budget is met."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sparsekit.measure.budget import BudgetError
from sparsekit.measure.volumes import CostTracker

_SLACK, _NARROW, _DOWN = 0.005, 100, (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
"""Unused share of a budget from which a local search is made, the largest number of widths for it, and the numbers of blocks
that it tries to remove from one width."""


@dataclass(frozen=True)
class Width:
    """Groups that keep equally many units, the numbers that they may keep, ascending, and the loss from each to the one before.

    The first loss is 0.
    """

    groups: tuple[str, ...]
    counts: tuple[int, ...]
    losses: tuple[float, ...]


@dataclass
class Walk:
    """Widths that are reduced and restored in blocks of units, with their costs.

    `places` says which of its counts each width has; `limits` are absolute and reachable.
    """

    widths: Sequence[Width]
    places: list[int]
    tracker: CostTracker
    limits: Mapping[str, float]

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
            if now > rank and heap and (now, taken, number, place) > heap[0]:  # costs have changed since: look again later
                heapq.heappush(heap, (now, taken, number, place))
                continue
            self._go(number, self.places[number] - 1)
            push(number)

    def fill(self, without: int | None = None) -> None:
        """Put blocks back while one fits, the most important per cost first, except in the width number `without`."""
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
            # What does not fit now never will: costs only grow from here on.
            left = [-n for _, n in fitting if places[-n] < len(widths[-n].counts) - 1]

    def tighten(self) -> None:
        """Search locally if no further unit fits and much of the budget is unused: exchange one group's units for others'.

        In a small network, one channel may cost a tenth of the budget, and three channels less of one layer may let another
        keep eight more. Among solutions that leave hardly anything unused, the most important units win; if there is none, the
        smallest rest.
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
