"""Sums of absolute parameter values per unit, read off the index table."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsekit.graph.groups import UnitGroup
from sparsekit.graph.index import wide
from sparsekit.graph.state import StateDict

__all__ = ["own_slices", "unit_magnitudes"]


def own_slices(group: UnitGroup, parameters: StateDict) -> tuple[int, ...]:
    """Positions in `group.slices` of the parameters that make the units: side "out", floating point, not statistics."""
    return tuple(
        i
        for i, piece in enumerate(group.slices)
        if piece.side == "out" and not _is_statistic(piece.name) and piece.name in parameters
    )


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
    total: Tensor | None = None
    for i in own_slices(group, weights):
        piece = group.slices[i]
        entry = wide(weights[piece.name].detach())
        others = [d for d in range(entry.dim()) if d != piece.dim]
        along = torch.linalg.vector_norm(entry, ord=1, dim=others) if others else entry.abs()
        part = along[piece.index.to(entry.device)].sum(1)
        total = part if total is None else total + part
    return total if total is not None else torch.zeros(group.size)
