"""Sampling policies: who trains in a round, and which updates count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from sparsekit.errors import InvalidValueError
from sparsekit_fl.client.messages import Update
from sparsekit_fl.options.checked import Hint, NonNegativeCount
from sparsekit_fl.policies.context import Policy, ServerContext


class SamplingPolicy(Policy):
    """Which clients train. The default draws uniformly without replacement."""

    def sample(self, ctx: ServerContext) -> list[int]:
        """Return the cohort of this round.

        Args:
            ctx: `ctx.cohort_size` clients are wanted, out of `ctx.roster`.

        Returns:
            Distinct ids out of the roster; updates are added up in this order. A round without anybody changes the model by
            its noise alone, where there is any.
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


def _shares(ctx: ServerContext, ids: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Each client's share of all training examples, float64 (clients,)."""
    sizes = np.asarray([ctx.roster[id].examples for id in ids], dtype=np.float64)
    shares: np.ndarray[tuple[int], np.dtype[np.float64]] = sizes / sizes.sum()
    return shares


@dataclass(frozen=True)
class BySize(SamplingPolicy):
    """Without replacement, each draw in proportion to the number of training examples.

    With `aggregate.weighting=uniform` a client counts by how often it is drawn, and not twice by its size.

    Source: Li, Huang, Yang, Wang, Zhang, ICLR 2020 (arXiv 1907.02189), scheme I, where draws are with replacement.
    """

    def sample(self, ctx: ServerContext) -> list[int]:
        ids = list(ctx.roster)
        places = ctx.rng.choice(len(ids), size=ctx.cohort_size, replace=False, p=_shares(ctx, ids))
        return sorted(int(ids[place]) for place in places)


@dataclass(frozen=True)
class Poisson(SamplingPolicy):
    """Each client by a coin of its own, so that the cohort is of the asked size on average, and empty now and then.

    Source: the sampling that accountants of differential privacy analyse; Abadi et al., CCS 2016.
    """

    def sample(self, ctx: ServerContext) -> list[int]:
        ids = list(ctx.roster)
        taken = ctx.rng.random(len(ids)) < ctx.cohort_size / len(ids)
        return sorted(int(ids[place]) for place in np.flatnonzero(taken))


@dataclass(frozen=True)
class PowerOfChoice(SamplingPolicy):
    """Of some candidates, drawn in proportion to their size, those of largest training loss.

    The loss is that of the client's last participation (the variant that the paper calls rpow-d), which costs no further
    message; who never took part comes first.

    Args:
        candidates: Number of candidates, at least the cohort; 0 takes twice the cohort. All clients at most.

    Source: Cho, Wang, Joshi, AISTATS 2022 (arXiv 2010.01243).
    """

    learns_from: ClassVar[tuple[str, ...]] = ("loss",)

    candidates: Annotated[NonNegativeCount, Hint("0 takes twice the cohort")] = 0

    def sample(self, ctx: ServerContext) -> list[int]:
        ids = list(ctx.roster)
        if 0 < self.candidates < ctx.cohort_size:
            raise InvalidValueError(
                f"sampling.candidates must be at least the cohort of {ctx.cohort_size}, got {self.candidates};"
                " 0 takes twice that"
            )
        size = min(len(ids), max(ctx.cohort_size, self.candidates or 2 * ctx.cohort_size))
        drawn = ctx.rng.choice(len(ids), size=size, replace=False, p=_shares(ctx, ids))
        losses = ctx.memory.get("losses", {})
        # The order of the draw decides among equals.
        ranked = sorted((ids[place] for place in drawn), key=lambda id: -losses.get(str(id), float("inf")))
        return sorted(int(id) for id in ranked[: ctx.cohort_size])

    def observe(self, ctx: ServerContext, updates: Sequence[Update]) -> None:
        losses = ctx.memory.setdefault("losses", {})
        losses.update({str(update.client_id): float(update.metrics["loss"]) for update in updates})


@dataclass(frozen=True)
class Fixed(SamplingPolicy):
    """The same cohort in every round.

    Args:
        clients: Their ids; empty draws a cohort once, uniformly.
    """

    clients: Annotated[tuple[int, ...], Hint("empty draws them once")] = ()

    def sample(self, ctx: ServerContext) -> list[int]:
        if not self.clients and "clients" not in ctx.memory:
            ctx.memory["clients"] = super().sample(ctx)
        wanted = list(self.clients or ctx.memory["clients"])
        unknown = [id for id in self.clients if id not in ctx.everybody]
        if unknown:
            raise InvalidValueError(f"sampling.clients names {unknown}, which are no clients of the run; ids are 0, 1, …")
        return sorted(id for id in wanted if id in ctx.roster)
