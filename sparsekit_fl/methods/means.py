"""Means of the clients' changes: over all clients, or entry by entry over those that hold it. Sums are in float64, in the order
of the updates.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from sparsekit.graph import StateDict, WeightMask, head_entries
from sparsekit_fl.client.messages import Update
from sparsekit_fl.client.packing import Kept
from sparsekit_fl.methods.context import ServerContext

Weights = Literal["examples", "uniform"]
"""How much a client counts: by its number of training examples, or equally."""

Over = Literal["all", "holders"]
"""The clients that an entry's mean is over: all, where an untrained entry counts as unchanged, or those that trained it."""


@dataclass(frozen=True, eq=False)
class Weighted:
    """One update with its weight.

    Args:
        delta: State-dict key → change, in the shapes that `kept` says.
        kept: The trained part of each entry.
        weight: Its weight, before dividing by their sum.
    """

    delta: StateDict
    kept: Kept
    weight: float


def weighted(server: ServerContext, updates: Sequence[Update], weights: Weights) -> list[Weighted]:
    """Return the updates with their weights, in the same order."""
    found = []
    for update in updates:
        weight = float(update.examples) if weights == "examples" else 1.0
        found.append(Weighted(update.delta, Kept(server.graph, update.mask), weight))
    return found


def changed_rows(server: ServerContext, update: Update, one: Weighted) -> Weighted:
    """Return an update without the rows of the output layer that did not change.

    A client that leaves out the classes of which it has no example sends their rows back unchanged. Averaging these in would
    slow down what the owners of the classes learn. The server is told nothing more: the changed rows are in the update.
    """
    if isinstance(update.mask, WeightMask):
        return one  # its entries lie in one row
    names = head_entries(server.graph.layers)
    head = {name: delta for name, delta in one.delta.items() if name in names and delta.ndim}
    rows = {name: (delta != 0).reshape(len(delta), -1).any(dim=1).nonzero().reshape(-1) for name, delta in head.items()}
    delta = {**one.delta, **{name: delta[rows[name]] for name, delta in head.items()}}
    return replace(one, delta=delta, kept=one.kept.only(rows))


def mean_change(state: StateDict, updates: Sequence[Weighted], over: Over = "all") -> dict[str, Tensor]:
    """Return the weighted mean of the changes: state-dict key → float64, dense.

    Args:
        state: The global state before the round; only its keys and shapes matter.
        updates: What to average.
        over: The clients that an entry's mean is over. Entries that nobody trained are left out, or zero.
    """
    # Divided by the first one, so that equal weights are exactly 1.
    unit = next((one.weight for one in updates if one.weight), 1.0)
    weights = [one.weight / unit for one in updates]
    total = reduce(operator.add, weights, 0.0)
    if total == 0:
        return {}
    sums = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in state.items()}
    for one, weight in zip(updates, weights, strict=True):
        for name, delta in one.delta.items():
            # The product of a 24-bit mantissa and a small number is exact in float64; only the sum rounds.
            one.kept.add(name, delta.to(torch.float64, copy=True).mul_(weight), sums[name])
    if over == "all":
        return {name: change / total for name, change in sums.items()}
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
    return changes


def moved(state: StateDict, changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a new state: `state` plus the changes, in its own types. Integers are rounded to the nearest, halves to even.

    Args:
        state: Read-only.
        changes: State-dict key → float64, dense; entries without a change stay as they are.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name not in changes:
            result[name] = tensor.clone()
            continue
        value = tensor.to(torch.float64) + changes[name]
        result[name] = (value if tensor.is_floating_point() else value.round()).to(tensor.dtype)
    return result


def mean(
    server: ServerContext,
    updates: Sequence[Update],
    *,
    weights: Weights = "examples",
    over: Over = "all",
    only_changed_rows: bool = False,
) -> dict[str, Tensor]:
    """Return the global state, moved by the weighted mean of the clients' changes.

    Args:
        server: The server's context.
        updates: The valid updates of the round.
        weights: By the number of examples, or equal. "uniform" over the holders is HeteroFL and FedRolex, "examples" FjORD.
        over: "all": all clients; an entry that a client did not train counts as unchanged there. "holders": the clients that
            trained the entry; what nobody trained stays.
        only_changed_rows: A client holds only those rows of the output layer that it changed; see `changed_rows`.

    Source: McMahan et al., AISTATS 2017; masked, over all: Xue et al., ICDE 2025 (arXiv 2412.07216), equation 13, and FedMP's
        R2SP (Jiang et al., ICDE 2022); over the holders: Diao, Ding, Tarokh, HeteroFL, ICLR 2021.
    """
    found = weighted(server, updates, weights)
    if only_changed_rows:
        found = [changed_rows(server, update, one) for update, one in zip(updates, found, strict=True)]
    return moved(server.state, mean_change(server.state, found, over))
