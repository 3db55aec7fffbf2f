"""Aggregate policies, and the rules by which the updates of a round become one change of the model.

`mean` is what methods ask for. The other rules take its place where some clients may be faulty; what a method does around them,
such as pruning the new model, stays. Sums are in float64, in the order of the list.
"""

import math
import operator
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsekit.graph import StateDict, WeightMask, head_entries
from sparsekit_fl.client.messages import Assignment, Update
from sparsekit_fl.client.packing import Kept
from sparsekit_fl.errors import UpdateError
from sparsekit_fl.options.config import RunConfig
from sparsekit_fl.policies.context import Policy, ServerContext

# Number of entries that are sorted at once: it bounds the memory of a round to little more than its updates and one entry.
_CHUNK = 2**18

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


def median(state: StateDict, updates: Sequence[Counted], over: Over) -> Changes:
    """Return the median of each entry over the clients that hold it; of an even number the mean of the middle two.

    So an entry that one client holds takes that client's value, and of two clients their mean: with fewer than three there
    is no majority. Clients count equally, since a faulty one could report a large weight.

    Source: Yin, Chen, Ramchandran, Bartlett: Byzantine-Robust Distributed Learning, ICML 2018 (arXiv 1803.01498),
        definition 1; over the holders of an entry is ours.
    """

    def middle(ordered: Tensor, count: Tensor) -> Tensor:
        low = ((count - 1).clamp(min=0) // 2).unsqueeze(0)
        high = (count // 2).clamp(max=ordered.shape[0] - 1).unsqueeze(0)
        return ((ordered.gather(0, low) + ordered.gather(0, high)) / 2).squeeze(0)

    return _by_entry(state, updates, over, middle)


def trimmed(share: float, holders: int) -> int:
    """Return the number of values that are dropped at each end: ⌈share · holders⌉, or less, so that one or two are left.

    Args:
        share: In [0, 0.5).
        holders: Clients that hold the entry.

    Returns:
        0 for one and two holders, whose mean it is; one or more from three holders on, where the share is not 0.
    """
    return min(math.ceil(share * holders - 1e-9), max(holders - 1, 0) // 2)


def trimmed_mean(state: StateDict, updates: Sequence[Counted], over: Over, *, share: float) -> Changes:
    """Return the mean of each entry over its holders, without the largest and the smallest values; see `trimmed`.

    Equal values are alike, so it does not matter which of them goes. Clients count equally.

    Args:
        share: Part of the values that goes at each end, in [0, 0.5): at least the share of faulty clients.

    Source: Yin et al., ICML 2018 (arXiv 1803.01498), definition 2, where share · holders is an integer; we round up, so
        that three clients outvote one, and take the holders of an entry.
    """

    def inner(ordered: Tensor, count: Tensor) -> Tensor:
        rows = ordered.shape[0]
        cut = torch.tensor([trimmed(share, holders) for holders in range(rows + 1)])[count]
        place = torch.arange(rows).unsqueeze(1)
        stays = (place >= cut) & (place < count - cut)
        # Not sum(0), which adds up in an order that depends on the number of entries and on the processor.
        total: Tensor = reduce(torch.add, torch.where(stays, ordered, 0.0))
        return total / (count - 2 * cut).clamp(min=1)

    return _by_entry(state, updates, over, inner)


def _by_entry(state: StateDict, updates: Sequence[Counted], over: Over, centre: Callable[[Tensor, Tensor], Tensor]) -> Changes:
    """Return a centre of the holders' changes, entry by entry.

    Where a method divides by all clients, the centre counts in the proportion of holders to clients, as the mean does.

    Args:
        centre: (float64 (updates, entries), ascending along the updates, infinite from the number of holders on; int64
            (entries,), that number) → the centre of each column, of any value where nobody holds it.
    """
    found = Changes({}, _whole_holders(state, updates))
    for name, tensor in state.items() if updates else ():
        dense = [_dense(one, name, tensor.shape).reshape(-1).split(_CHUNK) for one in updates]
        pieces = []
        for columns in zip(*dense, strict=True):
            rows = torch.stack([column.to(torch.float64) for column in columns])
            # What nobody holds is infinite, and sorted to the end. Sorted values make the order of arrival irrelevant.
            # NumPy sorts columns three times as fast as torch.
            ordered = torch.from_numpy(np.sort(rows.numpy(), axis=0))
            holders = torch.isfinite(ordered).sum(0)
            middle = torch.where(holders > 0, centre(ordered, holders), 0.0) + 0.0
            pieces.append(middle if over == "holders" else middle * holders / len(updates))
        found.changes[name] = torch.cat(pieces).view(tensor.shape)
    return found


def _dense(one: Counted, name: str, shape: torch.Size) -> Tensor:
    """A change in the shape of the model, infinite where the update does not hold it."""
    delta = one.delta[name]
    if one.kept.is_whole(name):
        return delta
    delta = delta if delta.is_floating_point() else delta.to(torch.float64)
    dense = torch.full(shape, math.inf, dtype=delta.dtype)
    one.kept.scatter(name, delta, dense)
    return dense


def update_norm(delta: StateDict) -> float:
    """Return the Euclidean norm of a change over all floating-point entries; integers, which count batches, are left out."""
    floats = [change for change in delta.values() if change.is_floating_point()]
    return math.sqrt(math.fsum(float(change.to(torch.float64).square().sum()) for change in floats))


def scales_to(updates: Sequence[Counted], limit: float | None) -> list[Counted]:
    """Return updates whose changes are scaled down to a norm where they are longer; None takes the median of their norms."""
    norms = [update_norm(one.delta) for one in updates]
    most = statistics.median(norms) if limit is None else limit
    return [replace(one, scale=most / norm if norm > most else 1.0) for one, norm in zip(updates, norms, strict=True)]


def norm_clipped(state: StateDict, updates: Sequence[Counted], over: Over, *, limit: float | None) -> Changes:
    """Return the method's own mean, weights and all, of changes that are scaled down to a common norm where they are longer.

    Integer entries, which count batches, move by the median of the clients' changes.

    Args:
        limit: The norm; None takes the median of the round's norms, so that half of the updates stay as they are.

    Source: Sun, Kairouz, Suresh, McMahan: Can You Really Backdoor Federated Learning?, 2019 (arXiv 1911.07963), norm
        thresholding; the median of the cohort in place of a constant is ours.
    """
    found = mean(state, scales_to(updates, limit), over)
    integers = {name: tensor for name, tensor in state.items() if not tensor.is_floating_point()}
    return found._replace(changes=found.changes | median(integers, updates, over).changes)


def rule_of(config: RunConfig) -> Rule:
    """Return the rule that `config.aggregation` names."""
    if config.aggregation == "median":
        return median
    if config.aggregation == "trimmed-mean":
        return partial(trimmed_mean, share=config.trim_share)
    return partial(norm_clipped, limit=config.clip_norm) if config.aggregation == "norm-clipped" else mean


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
            rule: Makes one change of all, as the options of the run say; see `rule_of`.
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
