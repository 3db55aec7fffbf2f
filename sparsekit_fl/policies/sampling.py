"""Sampling policies: who trains in a round, and which updates count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsekit_fl.client.messages import Update
from sparsekit_fl.policies.context import Policy, ServerContext


class SamplingPolicy(Policy):
    """Which clients train. The default draws uniformly without replacement."""

    def sample(self, ctx: ServerContext) -> list[int]:
        """Return the cohort of this round.

        Args:
            ctx: `ctx.cohort_size` clients are wanted, out of `ctx.roster`.

        Returns:
            Distinct ids out of the roster; updates are added up in this order.
        """
        ids = list(ctx.roster)
        return sorted(int(ids[place]) for place in ctx.rng.choice(len(ids), size=ctx.cohort_size, replace=False))

    def arrivals(self, ctx: ServerContext, updates: Sequence[Update]) -> list[tuple[Update, int]]:
        """Return the updates that are aggregated now, with their age in rounds.

        A method whose clients may be late keeps late updates in `ctx.memory` and returns them in a later round.
        """
        return [(update, 0) for update in updates]

    def seconds(self, ctx: ServerContext) -> float | None:
        """Return the simulated length of the round, after `arrivals`; None: until the slowest client has answered.

        A method that does not wait for everybody says here when its round ended.
        """
        return None

    def observe(self, ctx: ServerContext, updates: Sequence[Update]) -> None:
        """Learn from the round's valid updates."""


@dataclass(frozen=True)
class Uniform(SamplingPolicy):
    """Uniformly without replacement.

    Source: McMahan et al., AISTATS 2017.
    """
