"""Aggregate policies: how the server combines updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sparsekit.graph import StateDict, along, head_entries
from sparsekit_fl.client.messages import Assignment, Update
from sparsekit_fl.errors import UpdateError
from sparsekit_fl.policies.combine import Counted, Over, Rule, mean
from sparsekit_fl.policies.context import Policy, ServerContext

Weighting = Literal["examples", "uniform"]

Arrivals = Sequence[tuple[Update, int]]
"""Updates and their ages in rounds."""


class AggregatePolicy(Policy):
    """How the server combines updates.

    The default is the mean of the changes, weighted by the number of examples, where an entry that a client did not train
    counts as unchanged.
    """

    weighting: Weighting = "examples"
    over: Over = "all"
    """What an entry is divided by: the weight of all clients, or of the clients that hold it."""

    mean_only: ClassVar[str] = ""
    """Why the changes cannot be combined by another rule than the mean; empty where they can."""

    def broadcast(self, ctx: ServerContext, client_id: int) -> StateDict:
        """Return further tensors to send with an assignment."""
        return {}

    def validate(self, ctx: ServerContext, update: Update, assignment: Assignment) -> None:
        """Raise UpdateError where the update holds only a part of some entry, and nothing says what that means."""
        if self.over == "whole" and update.mask is not None:
            raise UpdateError(
                f"{type(self).__name__} needs whole entries, but client {update.client_id} sent masked ones; choose"
                ' Mean(over="all") (untrained entries count as unchanged) or Mean(over="holders") (mean over the clients that'
                " hold an entry)"
            )

    def coverage(self, ctx: ServerContext, name: str, update: Update) -> Tensor | None:
        """Return which entries of `name`, inside the update's mask, the client trained, where not all of them.

        Args:
            ctx: The context of the server.
            name: State-dict key.
            update: The update.

        Returns:
            Float, 1 or 0, of a shape that broadcasts with `update.delta[name]`; None for all.
        """
        return None

    def _counted(self, ctx: ServerContext, update: Update) -> Counted:
        covered = {name: self.coverage(ctx, name, update) for name in update.delta}
        weight = float(update.examples) if self.weighting == "examples" else 1.0
        return Counted(update, weight, {name: tensor for name, tensor in covered.items() if tensor is not None})

    def combine(self, ctx: ServerContext, state: StateDict, arrivals: Arrivals, rule: Rule = mean) -> dict[str, Tensor]:
        """Return the new shared state; `state` is read only. Integer entries are rounded to the nearest, halves to even.

        A method that changes how updates count, or what becomes of the common change, calls this with a rule around `rule`.

        Args:
            ctx: The context of the server.
            state: The shared state before the round.
            arrivals: Updates and their ages.
            rule: Makes one change of all, as the options of the run say; see `policies.combine`.
        """
        changes = rule(ctx.graph, state, [self._counted(ctx, update) for update, _ in arrivals], self.over).changes
        result: dict[str, Tensor] = {}
        for name, tensor in state.items():
            if name not in changes:
                result[name] = tensor.clone()
                continue
            value = tensor.to(torch.float64) + changes[name]
            result[name] = (value if tensor.is_floating_point() else value.round()).to(tensor.dtype)
        return result


@dataclass(frozen=True)
class Mean(AggregatePolicy):
    """The weighted mean of the clients' changes.

    Args:
        weighting: By the number of examples, or equal. "uniform" over the holders is HeteroFL and FedRolex, "examples" FjORD.
        over: Which clients an entry's mean is over. "whole": all, and each must send all of it. "all": all, and an entry that
            a client did not train counts as unchanged there. "holders": those that trained it; what nobody trained stays.

    Source: McMahan et al., AISTATS 2017; over all: Xue et al., ICDE 2025 (arXiv 2412.07216), equation 13, and FedMP's R2SP
        (Jiang et al., ICDE 2022); over the holders: Diao, Ding, Tarokh, HeteroFL, ICLR 2021.
    """

    weighting: Weighting = "examples"
    over: Over = "whole"


@dataclass(frozen=True)
class TouchedRowsMean(Mean):
    """The mean over the holders in which a row of the output layer counts only where it changed.

    With `OwnClasses`, or a masked loss, a client's rows of other clients' classes come back as they were; to average them in
    would slow down what the owners learn. The server is told nothing more: which rows changed is in the update.
    """

    over: Over = "holders"

    def coverage(self, ctx: ServerContext, name: str, update: Update) -> Tensor | None:
        """Return 1 on the rows of the output layer that changed, 0 on the others; None for all other entries."""
        delta = update.delta[name]
        if name not in head_entries(ctx.graph.layers) or not delta.ndim:
            return None
        if update.mask is not None and not hasattr(update.mask, "counts"):
            return None  # entries of a weight mask lie in one row
        changed = (delta != 0).reshape(delta.shape[0], -1).any(dim=1)
        return along(changed.to(torch.float64), 0, delta.ndim)
