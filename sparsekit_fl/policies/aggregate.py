"""Aggregate policies, and the mean by which the updates of a round become one change of the model.

Sums are in float64, in the order of the list.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sparsekit.graph import StateDict, WeightMask, head_entries
from sparsekit_fl.client.messages import Request, Update
from sparsekit_fl.client.packing import Kept
from sparsekit_fl.errors import UpdateError
from sparsekit_fl.policies.context import Policy, ServerContext

Over = Literal["whole", "all", "holders"]
"""Whether an entry is divided by the weight of all clients, or by that of those that hold it; "whole": all hold everything."""


@dataclass(frozen=True, eq=False)
class Counted:
    """One update as it counts.

    Args:
        delta: State-dict key → change, in the shapes that `kept` says.
        kept: What of each entry was trained.
        weight: Its weight, before dividing by their sum.
        scale: Factor on its changes, besides the weight.
    """

    delta: StateDict
    kept: Kept
    weight: float
    scale: float = 1.0


class Changes(NamedTuple):
    """What the updates of a round say together: state-dict key → change, float64, dense; and → number of whole holders.

    Entries without a change stay.
    """

    changes: dict[str, Tensor]
    holders: dict[str, float]


Rule = Callable[[StateDict, Sequence[Counted], Over], Changes]
"""(the shared state before the round, updates, what is divided by) → changes."""


def add_up(state: StateDict, updates: Sequence[Counted], weights: Sequence[float]) -> dict[str, Tensor]:
    """Add up updates: state-dict key → Σ weight · scale · change, float64, dense."""
    sums = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in state.items()}
    for one, weight in zip(updates, weights, strict=True):
        for name, delta in one.delta.items():
            # The product of a 24-bit mantissa and a small number is exact in float64; only the sum rounds.
            one.kept.add(name, delta.to(torch.float64, copy=True).mul_(weight * one.scale), sums[name])
    return sums


def _whole_holders(state: StateDict, updates: Sequence[Counted]) -> dict[str, float]:
    return {name: float(sum(one.kept.is_whole(name) for one in updates)) for name in state}


def mean(state: StateDict, updates: Sequence[Counted], over: Over) -> Changes:
    """Return the weighted mean of the changes."""
    # Divided by the first one, so that equal weights are exactly 1.
    unit = next((one.weight for one in updates if one.weight), 1.0)
    weights = [one.weight / unit for one in updates]
    holders = _whole_holders(state, updates)
    total = reduce(operator.add, weights, 0.0)
    if total == 0:
        return Changes({}, holders)
    sums = add_up(state, updates, weights)
    if over != "holders":
        return Changes({name: change / total for name, change in sums.items()}, holders)
    changes = {}
    for name, change in sums.items():
        whole, part = 0.0, None
        for one, weight in zip(updates, weights, strict=True):
            if one.kept.is_whole(name):
                whole += weight
            else:
                part = torch.zeros_like(change) if part is None else part
                one.kept.add(name, weight, part)
        if part is not None:
            held = part + whole
            changes[name] = torch.where(held > 0, change / held.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
        elif whole:
            changes[name] = change / whole
    return Changes(changes, holders)


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

    def broadcast(self, ctx: ServerContext, client_id: int) -> StateDict:
        """Return further tensors to send with an assignment."""
        return {}

    def validate(self, ctx: ServerContext, update: Update, assignment: Request) -> None:
        """Raise UpdateError where the update holds only a part of some entry, and nothing says what that means."""
        if self.over == "whole" and update.mask is not None:
            raise UpdateError(
                f"{type(self).__name__} needs whole entries, but client {update.client_id} sent masked ones; choose"
                ' Mean(over="all") (untrained entries count as unchanged) or Mean(over="holders") (mean over the clients that'
                " hold an entry)"
            )

    def counted(self, ctx: ServerContext, update: Update) -> Counted:
        """Return an update as it counts; the default takes all that its mask keeps, at the weight that `weighting` says."""
        weight = float(update.examples) if self.weighting == "examples" else 1.0
        return Counted(update.delta, Kept(ctx.graph, update.mask), weight)

    def combine(self, ctx: ServerContext, state: StateDict, arrivals: Arrivals, rule: Rule = mean) -> dict[str, Tensor]:
        """Return the new shared state; `state` is read only. Integer entries are rounded to the nearest, halves to even.

        A method that changes how updates count, or what becomes of the common change, calls this with a rule around `rule`.

        Args:
            ctx: The context of the server.
            state: The shared state before the round.
            arrivals: Updates and their ages.
            rule: Makes one change of all.
        """
        changes = rule(state, [self.counted(ctx, update) for update, _ in arrivals], self.over).changes
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

    def counted(self, ctx: ServerContext, update: Update) -> Counted:
        """Return the update without the rows of the output layer that did not change."""
        found = super().counted(ctx, update)
        if isinstance(update.mask, WeightMask):
            return found  # its entries lie in one row
        names = head_entries(ctx.graph.layers)
        head = {name: delta for name, delta in found.delta.items() if name in names and delta.ndim}
        rows = {name: (delta != 0).reshape(len(delta), -1).any(dim=1).nonzero().reshape(-1) for name, delta in head.items()}
        delta = {**found.delta, **{name: delta[rows[name]] for name, delta in head.items()}}
        return replace(found, delta=delta, kept=found.kept.only(rows))
