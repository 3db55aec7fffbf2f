"""Mask policies: which units or entries a client trains, before training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsekit.allocation import select
from sparsekit.criteria import Criterion, View
from sparsekit.errors import NoUnitsError
from sparsekit.graph import StateDict, UnitGraph
from sparsekit.rng import torch_generator
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.kept import Mask
from sparsekit_fl.client.messages import Update
from sparsekit_fl.policies.context import Policy, ServerContext
from sparsekit_fl.policies.local import LocalResult
from sparsekit_fl.problem.problem import Problem


@dataclass(frozen=True, kw_only=True)
class RoundView(View):
    """What a criterion may look at in a federated run.

    Args:
        round: The server round, counted from 1; 0 is before training.
    """

    round: int


class MaskPolicy(Policy):
    """Which. The default keeps everything."""

    def propose(self, ctx: ServerContext, client_id: int, proposal: float | None) -> Mask | None:
        """A mask that the server chooses: only what it keeps is sent down. Unless `choose` says otherwise, the client trains
        under it.

        Args:
            ctx: The server's; `ctx.state` is the global state.
            client_id: For whom.
            proposal: The ratio that the ratio policy proposes to this client.

        Returns:
            The mask, or None where the client chooses.
        """
        return None

    def choose(self, ctx: ClientContext, ratio: float, state: StateDict) -> Mask | None:
        """The mask that the client trains under. The default is the one that the server sent, or none.

        Args:
            ctx: The client's; `ctx.received` is what the server sent.
            ratio: The executed ratio.
            state: The dense state from which training starts.

        Returns:
            The mask, or None for the whole model.
        """
        return ctx.received

    def keep(self, ctx: ClientContext, result: LocalResult) -> None:
        """After training, on the client: put into `ctx.memory` what the next `choose` will need."""

    def observe(self, ctx: ServerContext, updates: Sequence[Update]) -> None:
        """Learn from the round's valid updates, before the next round's masks."""


@dataclass(frozen=True)
class Dense(MaskPolicy):
    """The whole model."""


@dataclass(frozen=True)
class UnitCriterion(MaskPolicy):
    """The units that a criterion ranks first at the client's ratio, chosen anew in each round.

    Args:
        criterion: What a unit is worth; it sees the round, the weights that the client starts from and the client's generator.
    """

    criterion: Criterion

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        require_units(graph, type(self.criterion).__name__)

    def choose(self, ctx: ClientContext, ratio: float, state: StateDict) -> Mask | None:
        view = RoundView(round=ctx.round, weights=state, generator=torch_generator(ctx.rng))
        return select(self.criterion, ctx.graph, ratio, view)


@dataclass(frozen=True)
class ServerCriterion(MaskPolicy):
    """The server chooses units of the global model by a criterion and sends the submodel alone.

    Args:
        criterion: What a unit is worth; it sees the round, the global weights and the server's generator.
    """

    criterion: Criterion

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        require_units(graph, type(self.criterion).__name__)

    def propose(self, ctx: ServerContext, client_id: int, proposal: float | None) -> Mask | None:
        view = RoundView(round=ctx.round, weights=ctx.state, generator=torch_generator(ctx.rng))
        return select(self.criterion, ctx.graph, 1.0 if proposal is None else proposal, view)


def require_units(graph: UnitGraph, who: str) -> None:
    """Raise NoUnitsError unless the graph has units; `who` wanted them."""
    if not graph.groups:
        raise NoUnitsError(
            f"the model has no units, so {who} has nothing to choose from;"
            " see what stays fixed with `sparsekit units`, or run a method that trains the whole model"
        )
