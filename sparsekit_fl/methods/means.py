"""Means of the clients' changes: over all clients, or entry by entry over those that hold it. Sums are in float64, in the order
of the updates.
"""

import operator
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from sparsekit.graph import StateDict, UnitGraph, WeightMask, head_entries
from sparsekit_fl.client.messages import Update
from sparsekit_fl.client.packing import Kept
from sparsekit_fl.methods.context import ServerContext

Weights = Literal["examples", "uniform"]
"""How much a client counts: by its number of training examples, or equally."""

Over = Literal["all", "holders"]
"""The clients that an entry's mean is over: all, where an untrained entry counts as unchanged, or those that trained it."""


def mean(
    server: ServerContext,
    updates: Sequence[Update],
    *,
    weights: Weights | Sequence[float] = "examples",
    over: Over = "all",
    only_changed_rows: bool = False,
) -> dict[str, Tensor]:
    """Return the global state, moved by the weighted mean of the clients' changes.

    Args:
        server: The server's context.
        updates: The valid updates of the round.
        weights: By the number of examples, or equal, or a number for each update. "uniform" over the holders is HeteroFL and
            FedRolex, "examples" FjORD.
        over: "all": all clients; an entry that a client did not train counts as unchanged there. "holders": the clients that
            trained the entry; what nobody trained stays.
        only_changed_rows: A client holds only those rows of the output layer that it changed. A client that leaves out the
            classes of which it has no example sends their rows back unchanged; averaging these in would slow down what the
            owners of the classes learn. The server is told nothing more: the changed rows are in the update.

    Source: McMahan et al., AISTATS 2017; masked, over all: Xue et al., ICDE 2025 (arXiv 2412.07216), equation 13, and FedMP's
        R2SP (Jiang et al., ICDE 2022); over the holders: Diao, Ding, Tarokh, HeteroFL, ICLR 2021.
    """
    return moved(server.state, mean_change(server, updates, weights=weights, over=over, only_changed_rows=only_changed_rows))


def mean_change(
    server: ServerContext,
    updates: Sequence[Update],
    *,
    weights: Weights | Sequence[float] = "examples",
    over: Over = "all",
    only_changed_rows: bool = False,
) -> dict[str, Tensor]:
    """Return the weighted mean of the changes, whose arguments are those of `mean`: state-dict key → float64, dense.

    Entries that nobody trained are left out, or zero.
    """
    if isinstance(weights, str):
        weights = [float(update.examples) if weights == "examples" else 1.0 for update in updates]
    # Divided by the first one, so that equal weights are exactly 1.
    unit = next((weight for weight in weights if weight), 1.0)
    weights = [weight / unit for weight in weights]
    total = reduce(operator.add, weights, 0.0)
    if total == 0:
        return {}
    parts = [(update.delta, Kept(server.graph, update.mask)) for update in updates]
    if only_changed_rows:
        parts = [_changed_rows(server.graph, *part) for part in parts]
    sums = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in server.state.items()}
    for (deltas, kept), weight in zip(parts, weights, strict=True):
        for name, delta in deltas.items():
            # The product of a 24-bit mantissa and a small number is exact in float64; only the sum rounds.
            kept.add(name, delta.to(torch.float64, copy=True).mul_(weight), sums[name])
    if over == "all":
        return {name: change / total for name, change in sums.items()}
    changes = {}
    for name, change in sums.items():
        whole, part = 0.0, None
        for (_, kept), weight in zip(parts, weights, strict=True):
            if kept.is_whole(name):
                whole += weight
            else:
                part = torch.zeros_like(change) if part is None else part
                kept.add(name, weight, part)
        if part is not None:
            held = part + whole
            changes[name] = torch.where(held > 0, change / held.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
        elif whole:
            changes[name] = change / whole
    return changes


def _changed_rows(graph: UnitGraph, deltas: StateDict, kept: Kept) -> tuple[StateDict, Kept]:
    """Return changes without the rows of the output layer that did not change."""
    if isinstance(kept.mask, WeightMask):
        return deltas, kept  # its entries lie in one row
    names = head_entries(graph.layers)
    head = {name: delta for name, delta in deltas.items() if name in names and delta.ndim}
    rows = {name: (delta != 0).reshape(len(delta), -1).any(dim=1).nonzero().reshape(-1) for name, delta in head.items()}
    return {**deltas, **{name: delta[rows[name]] for name, delta in head.items()}}, kept.only(rows)


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
