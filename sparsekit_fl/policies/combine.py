"""How the updates of a round become one change of the model: functions over the list of updates.

`mean` is what methods ask for. The others take its place where some clients may be faulty; what a method does around them, such
as pruning the new model, stays. Sums are in float64, in the order of the list.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsekit.graph import StateDict, UnitGraph
from sparsekit_fl.client.kept import Kept
from sparsekit_fl.client.messages import Update
from sparsekit_fl.options.config import RunConfig

# Number of entries that are sorted at once: it bounds the memory of a round to little more than its updates.
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
        shape = tensor.shape
        whole = all(kept.is_whole(name) for kept, _ in held)
        # What is whole is cut anywhere, and what has gaps along its first axis, so that no dense copy of every update is made.
        size = 1 if whole or not shape else shape[1:].numel()
        count, step = shape.numel() // max(size, 1), max(1, _CHUNK // max(size, 1))
        result = torch.empty(shape.numel(), dtype=torch.float64)
        for begin in range(0, count, step):
            end = min(begin + step, count)
            rows = torch.stack([_piece(kept, one, name, begin, end, whole, shape) for kept, one in held])
            # What nobody holds is infinite, and sorted to the end. Sorted values make the order of arrival irrelevant.
            # NumPy sorts columns three times as fast as torch.
            ordered = torch.from_numpy(np.sort(rows.numpy(), axis=0))
            holders = torch.isfinite(ordered).sum(0)
            middle = torch.where(holders > 0, centre(ordered, holders), 0.0) + 0.0
            result[begin * size : end * size] = middle if over == "holders" else middle * holders / len(updates)
        found.changes[name] = result.view(shape)
        found.holders[name] = float(sum(kept.is_whole(name) and name not in one.covered for kept, one in held))
    return found


def _piece(kept: Kept, one: Counted, name: str, begin: int, end: int, whole: bool, shape: torch.Size) -> Tensor:
    """A part of a dense change, flat, float64, infinite where the update does not hold it: positions or rows [begin, end)."""
    delta = one.update.delta[name]
    if name in one.covered:
        delta = torch.where(one.covered[name] > 0, delta.to(torch.float64), math.inf)
    if whole:
        return delta.reshape(-1)[begin:end].to(torch.float64)
    piece = torch.full((end - begin, *shape[1:]), math.inf, dtype=torch.float64)
    if not shape:
        kept.scatter(name, delta.to(torch.float64), piece.view(()))
    else:
        kept.scatter_rows(name, delta.to(torch.float64), piece, begin)
    return piece.view(-1)


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
