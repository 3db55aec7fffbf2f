"""Ratio policies: how large a share of the units a client trains. The server proposes, the client decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.messages import Update
from sparsekit_fl.options.checked import Ratio
from sparsekit_fl.policies.context import Policy, ServerContext


class RatioPolicy(Policy):
    """How large a share of its units a client trains. The default is the whole model."""

    def propose(self, ctx: ServerContext, client_id: int) -> float | None:
        """Return the proposal of the server, in (0, 1]; None for no proposal."""
        return None

    def choose(self, ctx: ClientContext, proposal: float | None) -> float:
        """Return the executed ratio, in (0, 1]; it is reported with the update."""
        return 1.0

    def observe(self, ctx: ServerContext, update: Update) -> None:
        """Learn from a valid update: credit goes to the executed ratio, `update.ratio`."""

    def observe_all(self, ctx: ServerContext, updates: Sequence[Update]) -> None:
        """Learn from the round's valid updates, for policies that compare clients. The default observes each by itself."""
        for update in updates:
            self.observe(ctx, update)


@dataclass(frozen=True)
class Full(RatioPolicy):
    """The whole model for everybody."""


@dataclass(frozen=True)
class Constant(RatioPolicy):
    """The same ratio for everybody.

    Args:
        ratio: Share of units kept, in (0, 1].
    """

    ratio: Ratio = 0.5

    def propose(self, ctx: ServerContext, client_id: int) -> float | None:
        return self.ratio

    def choose(self, ctx: ClientContext, proposal: float | None) -> float:
        return self.ratio


@dataclass(frozen=True)
class ByCapability(RatioPolicy):
    """What the client can do: its capability's ratio in this round.

    Source: Diao, Ding, Tarokh, HeteroFL, ICLR 2021.
    """

    def propose(self, ctx: ServerContext, client_id: int) -> float | None:
        return ctx.roster[client_id].capability.ratio

    def choose(self, ctx: ClientContext, proposal: float | None) -> float:
        return ctx.capability.ratio
