"""Sums of absolute or squared parameter values per unit, read off the index table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from sparsekit.graph.groups import UnitGroup
from sparsekit.graph.index import wide
from sparsekit.graph.state import StateDict

Order = Literal[1, 2]


def own_slices(group: UnitGroup, parameters: StateDict) -> tuple[int, ...]:
    """Positions in `group.slices` of the parameters that make the units: side "out", floating point, not statistics."""
    return tuple(
        i
        for i, piece in enumerate(group.slices)
        if piece.side == "out" and not _is_statistic(piece.name) and piece.name in parameters
    )


def all_slices(group: UnitGroup, parameters: StateDict) -> tuple[int, ...]:
    """The same with those that read the units."""
    own = set(own_slices(group, parameters))
    return tuple(i for i, s in enumerate(group.slices) if i in own or (s.side == "in" and s.name in parameters))


def _is_statistic(name: str) -> bool:
    return name.rpartition(".")[2] in {"running_mean", "running_var"}


def unit_magnitudes(group: UnitGroup, weights: StateDict) -> Tensor:
    """Σ |θ| over the entries that make each unit, |θ|_J in the paper.

    Args:
        group: The units.
        weights: The dense state.

    Returns:
        float (units,) in the dtype of the weights, float32 where that is shorter.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), importance regularisation term.
    """
    return unit_sums(group, weights, own_slices(group, weights), order=1)


def unit_sums(group: UnitGroup, weights: StateDict, slices: Iterable[int], *, order: Order) -> Tensor:
    """Σ |θ| or Σ θ² over some slices of each unit.

    Args:
        group: The units.
        weights: The dense state.
        slices: Positions in `group.slices`.
        order: 1 for absolute values, 2 for squares.

    Returns:
        float (units,) in the dtype of the weights, float32 where that is shorter; 0 where there are no slices.
    """
    total: Tensor | None = None
    for i in slices:
        piece = group.slices[i]
        entry = wide(weights[piece.name].detach())
        others = [d for d in range(entry.dim()) if d != piece.dim]
        if order == 1:
            along = torch.linalg.vector_norm(entry, ord=1, dim=others) if others else entry.abs()
        else:
            along = entry.square().sum(others) if others else entry.square()
        part = along[piece.index.to(entry.device)].sum(1)
        total = part if total is None else total + part.to(total.device)
    return total if total is not None else torch.zeros(group.size)
