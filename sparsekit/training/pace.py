"""Pace: when to explore which group, so that exploration costs its share of the work and no more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

__all__ = ["Pace"]


class Pace:
    """Share out exploration over the steps of a training.

    With a known number of steps, the share anneals by a cosine from 2 / `end` times `explore` to 0 at `end` of the training,
    and adds up to `explore` at most: rounds that bring nothing halve what is left of it, until one does. Without one it is
    `explore` at every time, for a number of rounds.

    Args:
        explore: Share of extra work.
        steps: Steps of the whole training, if known.
        end: Share of the training after which nothing changes.
        rounds: Rounds of exploration where the number of steps is not known.
    """

    def __init__(self, explore: float, steps: int | None, end: float, rounds: int) -> None:
        self.explore, self.steps, self.end, self.rounds = explore, steps, end, rounds
        self.step = 0
        self.round = 0
        self.spent = 0.0
        """Extra work so far, in narrow passes."""
        self.eagerness = 1.0
        """Part of the allowance that may be spent."""
        self.seen: dict[str, int] = {}
        """Group → samples in the present round."""

    @property
    def progress(self) -> float:
        """How much of the time in which the mask may change is over, in [0, 1]."""
        gone = self.step / (self.end * self.steps) if self.steps else self.round / self.rounds
        return min(1.0, gone)

    @property
    def over(self) -> bool:
        """Whether the mask has settled."""
        return self.explore == 0.0 or self.progress >= 1.0

    @property
    def share(self) -> float:
        """From 1 at first to 0 at the end, by a cosine."""
        return 0.5 * (1.0 + math.cos(math.pi * self.progress))

    def allowance(self) -> float:
        """Extra work that may have been spent by now, in narrow passes."""
        if self.steps is None:
            return self.explore * (self.step + 1)
        done = min(1.0, (self.step + 1) / (self.end * self.steps))
        return self.eagerness * self.explore * self.steps * (done + math.sin(math.pi * done) / math.pi)

    def next_group(self, costs: Mapping[str, float]) -> str | None:
        """The group to explore in this step, if its cost is allowed: the one that was seen least in this round.

        Args:
            costs: Group → extra work of exploring it, in narrow passes.
        """
        if not costs or self.over:
            return None
        group = min(costs, key=lambda name: self.seen.get(name, 0))
        return group if self.spent + costs[group] <= self.allowance() else None

    def saw(self, group: str, cost: float) -> None:
        """Count a sample of `group`."""
        self.seen[group] = self.seen.get(group, 0) + 1
        self.spent += cost

    def complete(self, groups: Sequence[str], samples: int) -> bool:
        """Whether every group has its samples of this round."""
        return bool(groups) and all(self.seen.get(name, 0) >= samples for name in groups)

    def next_round(self, fruitful: bool | None) -> None:
        """Begin the next round.

        Args:
            fruitful: Whether exploration brought something; None where that is not known yet.
        """
        self.round += 1
        self.seen = {}
        if fruitful is not None:
            self.eagerness = 1.0 if fruitful else 0.5 * self.eagerness
