"""Magnitude: importance from the weights alone, read off the index table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from sparsekit.criteria.base import ScoringContext
from sparsekit.criteria.used_weights import UsedWeight, used_weights
from sparsekit.errors import InvalidValueError, MissingImportanceError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import UnitGroup, UnitSlice
from sparsekit.graph.index import StateDict, wide

Order = Literal[1, 2]

_STATISTICS = ("running_mean", "running_var")


def unit_entries(model: nn.Module, graph: UnitGraph) -> dict[str, list[tuple[nn.Parameter, UnitSlice]]]:
    """Return group name → the parameters that hold its units, with their slices, each once; of tied names the first counts."""
    entries = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, list[tuple[nn.Parameter, UnitSlice]]] = {}
    for name, group in graph.groups.items():
        once: dict[tuple[int, int], tuple[nn.Parameter, UnitSlice]] = {}
        for piece in group.slices:
            if (entry := entries.get(piece.name)) is not None:
                once.setdefault((id(entry), piece.dim), (entry, piece))
        found[name] = list(once.values())
    return found


def along_axis(values: Tensor, dim: int) -> Tensor:
    others = [axis for axis in range(values.dim()) if axis != dim]
    return values.sum(others) if others else values


def unit_magnitudes(group: UnitGroup, weights: StateDict) -> Tensor:
    """Return Σ |θ| over the entries that make each unit, |θ|_J in the paper: float (units,), at least float32.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), importance regularization term.
    """
    return unit_sums(group, weights, order=1)


def unit_sums(group: UnitGroup, weights: StateDict, *, order: Order, used: Sequence[UsedWeight] = ()) -> Tensor:
    """Return Σ |θ| or Σ θ² over the entries that make each unit, without running statistics: float (units,), or 0.

    Weights that are `used` replace the entries from which they are computed.
    """
    total: Tensor | None = None
    done: set[tuple[int, int]] = set()
    for piece in group.slices:
        if piece.name not in weights or piece.side != "out" or piece.name.endswith(_STATISTICS):
            continue
        entry = weights[piece.name]
        value = next((each.value for each in used if each.replaces(piece, entry.shape)), None)
        if value is not None:
            if (id(value), piece.dim) in done:
                continue
            done.add((id(value), piece.dim))
        entry = wide((entry if value is None else value).detach())
        if order == 1 and entry.dim() > 1:  # a norm, which makes no copy of the entry
            along = torch.linalg.vector_norm(entry, ord=1, dim=[axis for axis in range(entry.dim()) if axis != piece.dim])
        else:
            along = along_axis(entry.abs() if order == 1 else entry.square(), piece.dim)
        part = along[piece.index.to(entry.device)].sum(1)
        total = part if total is None else total + part.to(total.device)
    return total if total is not None else torch.zeros(group.size)


@dataclass(frozen=True)
class Magnitude:
    """The size of a unit's own parameters: filter rows, bias, norm scale.

    Weights that the model computes from several entries, as with weight norm or `torch.nn.utils.prune`, count as the model
    uses them.

    Scores depend on the scale of a layer; allocations compare groups by shares of them.

    Args:
        order: 1 for the sum of absolute values, 2 for the square root of the sum of squares.

    Raises:
        InvalidValueError: another order.

    Source: Li et al., Pruning Filters for Efficient ConvNets, ICLR 2017.
    """

    order: Order = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        if self.order not in (1, 2):
            raise InvalidValueError(f"order must be 1 (absolute values) or 2 (squares), got {self.order!r}")

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:
        """Sum up each unit's weights, in their dtype."""
        found, weights = {}, context.weights
        if weights is None:
            raise MissingImportanceError("Magnitude needs the weights; pass ScoringContext(weights=model.state_dict())")
        used = () if context.model is None or context.call is None else used_weights(context.model, *context.call)
        for name, group in graph.groups.items():
            sums = unit_sums(group, weights, order=self.order, used=used)
            found[name] = sums if self.order == 1 else sums.sqrt()
        return found
