"""Accumulator and Rule: the sums over the updates of a round, and what may take their place.

A rule takes the place of the sums in `AggregatePolicy`; what a method does around them, such as pruning the new model, stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsekit.graph import StateDict
from sparsekit_fl.policies.server_optimizer import ServerOptimizer
from sparsekit_fl.wire.kept import Kept
from sparsekit_fl.wire.messages import Update

__all__ = ["Accumulator", "Rule"]


@dataclass
class Accumulator:
    """Sums over the updates of a round.

    Args:
        sums: State-dict key → Σ weight · delta, float64, dense.
        weights: State-dict key → Σ weight of the updates that hold each entry, float64, dense; only keys that some
            update holds in part.
        weight: Σ weight of all updates.
        unit: The first weight; all are divided by it, so that equal weights are exactly 1 under any rule.
        covered: State-dict key → Σ weight of the updates that hold it whole.
        count: Number of updates.
        extra: For subclasses.
        rule: Combines the changes instead of the sums; None: the mean.
        optimizer: What the server makes of the combined changes; None: it adds them.
        asked: Keys whose change was computed.
    """

    sums: dict[str, Tensor]
    weights: dict[str, Tensor] = field(default_factory=dict)
    weight: float = 0.0
    unit: float = 0.0
    covered: dict[str, float] = field(default_factory=dict)
    count: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    rule: Rule | None = None
    optimizer: ServerOptimizer | None = None
    asked: set[str] = field(default_factory=set)


class Rule:
    """How the changes of one round are combined; made anew for every round. This one is the mean of scaled changes."""

    counts_holders = True
    """False where the number of holders of an entry must have no influence."""

    def begin(self, acc: Accumulator, updates: Sequence[Update], state: StateDict) -> None:
        """Prepare for the round.

        Args:
            acc: Empty.
            updates: All updates that will be added.
            state: The shared state before the round.
        """

    def weight(self, weight: float) -> float:
        """Return the weight of an update whose method gives it `weight`."""
        return weight

    def scale(self, update: Update) -> float:
        """Return the factor on the changes of an update, besides its weight."""
        return 1.0

    def add(self, acc: Accumulator, name: str, kept: Kept, update: Update, covered: Tensor | None, weight: float) -> None:
        """Add one entry of an update.

        Args:
            acc: To be written to.
            name: State-dict key.
            kept: Gathers and scatters under the update's mask.
            update: The update.
            covered: Which positions count, as in `AggregatePolicy.coverage`.
            weight: Over the first update's weight.
        """
        change = update.delta[name].to(torch.float64) * (weight * self.scale(update))
        kept.add(name, change if covered is None else change * covered, acc.sums[name])

    def change(self, acc: Accumulator, name: str, mean: Callable[[], Tensor | None], *, by_coverage: bool) -> Tensor | None:
        """Return the change of an entry of the state; None: it stays.

        Args:
            acc: With all updates.
            name: State-dict key.
            mean: Returns the method's own mean of `acc`.
            by_coverage: Whether the method divides by the clients that hold an entry, and not by all.
        """
        return mean()
