"""Aggregate policies, and the rules by which the updates of a round become one change of the model.

`mean` is what methods ask for. The other rules take its place where some clients may be faulty; what a method does around them,
such as pruning the new model, stays. Sums are in float64, in the order of the list.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsekit.graph import StateDict, UnitGraph, along, head_entries
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
        update: The update.
        weight: Its weight, before dividing by their sum.
        covered: State-dict key → which positions of `update.delta` were trained, 1 or 0, of a shape that broadcasts with it;
            absent for all.
        scale: Factor on its changes, besides the weight.
    """

    update: Update
    weight: float
    covered: Mapping[str, Tensor] = field(default_factory=dict)
    scale: float = 1.0


class Changes(NamedTuple):
    """What the updates of a round say together: state-dict key → change, float64, dense; and → number of whole holders.

    Entries without a change stay.
    """

    changes: dict[str, Tensor]
    holders: dict[str, float]


Rule = Callable[[UnitGraph, StateDict, Sequence[Counted], Over], Changes]
"""(the units of the model, the shared state before the round, updates, what is divided by) → changes."""


class Sums(NamedTuple):
    """Sums over updates, whose weights are divided by the first one, so that equal weights are exactly 1.

    Args:
        changes: State-dict key → Σ weight · scale · delta, float64, dense.
        weight: Σ weight of all updates.
        whole: State-dict key → Σ weight of the updates that hold it whole.
        weights: State-dict key → Σ weight of the others, entry by entry, dense; only keys that some update holds in part.
        holders: State-dict key → number of updates that hold it whole.
    """

    changes: dict[str, Tensor]
    weight: float
    whole: dict[str, float]
    weights: dict[str, Tensor]
    holders: dict[str, float]


def add_up(graph: UnitGraph, state: StateDict, updates: Sequence[Counted], *, by_holders: bool = False) -> Sums:
    """Add up updates; `by_holders` adds up the weights of each entry's holders too."""
    found = Sums({name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in state.items()}, 0.0, {}, {}, {})
    unit = next((one.weight for one in updates if one.weight), 1.0)
    total = 0.0
    for one in updates:
        weight, kept = one.weight / unit, Kept(graph, one.update.mask)
        for name, delta in one.update.delta.items():
            covered = one.covered.get(name)
            # The product of a 24-bit mantissa and a small number is exact in float64; only the sum rounds.
            change = delta.to(torch.float64, copy=True).mul_(weight * one.scale)
            kept.add(name, change if covered is None else change * covered, found.changes[name])
            if kept.is_whole(name) and covered is None:
                found.whole[name] = found.whole.get(name, 0.0) + weight
                found.holders[name] = found.holders.get(name, 0.0) + 1.0
            elif by_holders:
                if name not in found.weights:
                    found.weights[name] = torch.zeros_like(found.changes[name])
                kept.add(name, weight if covered is None else (weight * covered).expand(delta.shape), found.weights[name])
        total += weight
    return found._replace(weight=total)


def mean(graph: UnitGraph, state: StateDict, updates: Sequence[Counted], over: Over) -> Changes:
    """Return the weighted mean of the changes."""
    sums = add_up(graph, state, updates, by_holders=over == "holders")
    if sums.weight == 0:
        return Changes({}, sums.holders)
    if over != "holders":
        return Changes({name: total / sums.weight for name, total in sums.changes.items()}, sums.holders)
    changes = {}
    for name, total in sums.changes.items():
        whole = sums.whole.get(name, 0.0)
        if name in sums.weights:
            held = sums.weights[name] + whole
            changes[name] = torch.where(held > 0, total / held.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
        elif whole:
            changes[name] = total / whole
    return Changes(changes, sums.holders)


def median(graph: UnitGraph, state: StateDict, updates: Sequence[Counted], over: Over) -> Changes:
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

    return _by_entry(graph, state, updates, over, middle)


def trimmed(share: float, holders: int) -> int:
    """Return the number of values that are dropped at each end: ⌈share · holders⌉, or less, so that one or two are left.

    Args:
        share: In [0, 0.5).
        holders: Clients that hold the entry.

    Returns:
        0 for one and two holders, whose mean it is; one or more from three holders on, where the share is not 0.
    """
    return min(math.ceil(share * holders - 1e-9), max(holders - 1, 0) // 2)


def trimmed_mean(graph: UnitGraph, state: StateDict, updates: Sequence[Counted], over: Over, *, share: float) -> Changes:
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

    return _by_entry(graph, state, updates, over, inner)


def _by_entry(
    graph: UnitGraph, state: StateDict, updates: Sequence[Counted], over: Over, centre: Callable[[Tensor, Tensor], Tensor]
) -> Changes:
    """Return a centre of the holders' changes, entry by entry.

    Where a method divides by all clients, the centre counts in the proportion of holders to clients, as the mean does.

    Args:
        centre: (float64 (updates, entries), ascending along the updates, infinite from the number of holders on; int64
            (entries,), that number) → the centre of each column, of any value where nobody holds it.
    """
    held = [(Kept(graph, one.update.mask), one) for one in updates]
    found = Changes({}, {})
    for name, tensor in state.items() if held else ():
        dense = [_dense(kept, one, name, tensor.shape).reshape(-1).split(_CHUNK) for kept, one in held]
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
        found.holders[name] = float(sum(kept.is_whole(name) and name not in one.covered for kept, one in held))
    return found


def _dense(kept: Kept, one: Counted, name: str, shape: torch.Size) -> Tensor:
    """A change in the shape of the model, infinite where the update does not hold it."""
    delta = one.update.delta[name]
    if name in one.covered:
        delta = torch.where(one.covered[name] > 0, delta.to(torch.float64), math.inf)
    if kept.is_whole(name):
        return delta
    delta = delta if delta.is_floating_point() else delta.to(torch.float64)
    dense = torch.full(shape, math.inf, dtype=delta.dtype)
    kept.scatter(name, delta, dense)
    return dense


def update_norm(update: Update) -> float:
    """Return the Euclidean norm of a change over all floating-point entries; integers, which count batches, are left out."""
    floats = [delta for delta in update.delta.values() if delta.is_floating_point()]
    return math.sqrt(math.fsum(float(delta.to(torch.float64).square().sum()) for delta in floats))


def scales_to(updates: Sequence[Counted], limit: float | None) -> list[Counted]:
    """Return updates whose changes are scaled down to a norm where they are longer; None takes the median of their norms."""
    norms = [update_norm(one.update) for one in updates]
    most = statistics.median(norms) if limit is None else limit
    return [replace(one, scale=most / norm if norm > most else 1.0) for one, norm in zip(updates, norms, strict=True)]


def norm_clipped(graph: UnitGraph, state: StateDict, updates: Sequence[Counted], over: Over, *, limit: float | None) -> Changes:
    """Return the method's own mean, weights and all, of changes that are scaled down to a common norm where they are longer.

    Integer entries, which count batches, move by the median of the clients' changes.

    Args:
        limit: The norm; None takes the median of the round's norms, so that half of the updates stay as they are.

    Source: Sun, Kairouz, Suresh, McMahan: Can You Really Backdoor Federated Learning?, 2019 (arXiv 1911.07963), norm
        thresholding; the median of the cohort in place of a constant is ours.
    """
    found = mean(graph, state, scales_to(updates, limit), over)
    integers = {name: tensor for name, tensor in state.items() if not tensor.is_floating_point()}
    return found._replace(changes=found.changes | median(graph, integers, updates, over).changes)


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
            rule: Makes one change of all, as the options of the run say; see `rule_of`.
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
