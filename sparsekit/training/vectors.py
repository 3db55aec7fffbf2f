"""UnitVectors: vectors over all units of a narrow model, such as the gradients of their gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from sparsekit._torch import identity
from sparsekit.criteria.weights import unit_magnitudes
from sparsekit.graph import StateDict, UnitGraph, UnitMask, group_order
from sparsekit.graph.index import wide
from sparsekit.surgery.optimizer_state import HasState
from sparsekit.training.narrow_model import NarrowModel

Gradients: TypeAlias = Mapping[Tensor, Tensor] | None
"""Weight → gradient; None reads `.grad` of the weights."""


def split_units(graph: UnitGraph, flat: Tensor) -> dict[str, Tensor]:
    """Return group name → (units,): views of a vector over all units, float (J,)."""
    parts = flat.split([group.size for group in graph.groups.values()])
    return dict(zip(graph.groups, parts, strict=True))


# Cached, since a table made on the CPU would be copied to the device of the model in every step.
@lru_cache(maxsize=256)
def unit_tables(sizes: tuple[int, ...], device: torch.device | None) -> tuple[Tensor, Tensor]:
    """Return the group of each unit, int64 (J,), and the size of each group, int64 (groups,)."""
    with torch.inference_mode(False):
        counts = torch.tensor(sizes, dtype=torch.long)
        return torch.arange(len(sizes)).repeat_interleave(counts).to(device), counts.to(device)


class GateReader(NamedTuple):
    """An axis of a leaf whose positions belong to units."""

    leaf: nn.Parameter
    dim: int
    name: str  # state-dict key of the leaf
    units: Tensor  # int64 (dense size,), the unit of each dense position; J where none

    def products(self, gradients: Gradients) -> Tensor:
        """Return Σ gradient · weight at each position along the axis: (narrow size,)."""
        weight, kind = self.leaf.detach(), self.leaf.device.type
        gradient = self.leaf.grad if gradients is None else gradients.get(self.leaf)
        if gradient is None:
            return wide(weight).new_zeros(weight.shape[self.dim])
        if torch.is_autocast_enabled(kind):  # backward() under autocast: CUDA would sum in half precision
            with torch.autocast(kind, enabled=False):
                return self.products(gradients)
        product = wide(gradient) * wide(weight)
        if product.dim() == 1:
            return product
        if self.dim == 0:
            return product.flatten(1).sum(1)
        if self.dim == 1:
            # A matrix-vector product with ones runs at memory speed, where a strided reduction does not.
            flat = product.flatten(1)
            columns = torch.mv(flat.t(), flat.new_ones(flat.shape[0]))
            return columns.reshape(product.shape[1], -1).sum(1) if product.dim() > 2 else columns
        return product.sum([d for d in range(product.dim()) if d != self.dim])


class UnitVectors:
    """Computes vectors over the units of a narrow model, float (J,), in the order of the graph's groups.

    In small steps, most of the time is spent in Python, so each operation runs once over all units of a model. Change the mask
    through `set_mask`, and call `follow` after `load` of the narrow model.
    """

    def __init__(self, narrow_model: NarrowModel) -> None:
        self.narrow_model = narrow_model
        graph = narrow_model.graph
        self.offsets = group_order(graph.groups.values())
        self.total = graph.units
        self._leaves = narrow_model.named_parameters()
        # All tables are on the device of the model, so that a step copies nothing between devices.
        device = next((leaf.device for leaf in self._leaves.values()), None)
        self.group_sizes = tuple(group.size for group in graph.groups.values())
        self.group_of, self.sizes = unit_tables(self.group_sizes, device)
        self._consumers = self._gate_readers()
        self.follow()

    def _gate_readers(self) -> list[GateReader]:
        graph = self.narrow_model.graph
        wanted: dict[tuple[str, int], Tensor] = {}
        for name, group in graph.groups.items():
            for piece in group.slices:
                if piece.name in self._leaves and piece.gated:
                    empty = torch.full((graph.shapes[piece.name][piece.dim],), self.total, dtype=torch.int64)
                    units = torch.arange(group.size) + self.offsets[name]
                    table = wanted.setdefault((piece.name, piece.dim), empty)
                    table[piece.index.reshape(-1)] = units.repeat_interleave(piece.index.shape[1])
        # Matrices before vectors: this fixes the order of summation within a unit.
        ordered = sorted(wanted.items(), key=lambda item: self._leaves[item[0][0]].dim() == 1)
        return [GateReader(self._leaves[name], dim, name, units) for (name, dim), units in ordered]

    def set_mask(self, mask: UnitMask, optimizers: Sequence[HasState] = ()) -> None:
        self.narrow_model.set_mask(mask, optimizers)
        self.follow()

    def magnitudes(self, dense: StateDict | None = None) -> Tensor:
        """Return Σ |θ| over the parameters that produce each unit, in a dense state or the present one: float (J,)."""
        dense = self.narrow_model.dense_state() if dense is None else dense
        leaves = {name: dense[name].detach().to(self.group_of.device) for name in self._leaves}
        return torch.cat([unit_magnitudes(group, leaves) for group in self.narrow_model.graph.groups.values()])

    def follow(self) -> None:
        self._seen: tuple[int, int] | None = None  # identity of scores for which the mask was right
        mask, device = self.narrow_model.mask, self.group_of.device
        kept = torch.cat([mask[name].cpu() for name in self.offsets])
        self._any_dropped = not bool(kept.all())
        self.kept = kept.to(device)  # bool (J,)
        positions = self.narrow_model.positions
        units = [each.units[positions(each.name)[each.dim]].to(device) for each in self._consumers]
        self._consumer_units = torch.cat(units) if units else torch.zeros(0, dtype=torch.int64, device=device)
        """Unit of each narrow position of all consumers; J if there is none."""

    def gate_gradient(self, gradients: Gradients = None) -> Tensor:
        """Return ∂L/∂gate of each kept unit, 0 for the others: float (J,).

        It is Σ gradient · weight over the gated entries of the unit.

        Source: first-order Taylor importance, Molchanov et al., CVPR 2019; straight-through on kept units.
        """
        flat = torch.cat([consumer.products(gradients) for consumer in self._consumers])
        return flat.new_zeros(self.total + 1).index_add_(0, self._consumer_units, flat)[:-1]

    def mask_unchanged(self, scores: Tensor) -> bool:
        """Return, without sorting, whether the mask still keeps the largest scores, float (J,), of every group.

        If the least kept score equals the largest dropped one, the result is False, and the caller compares by index.
        """
        seen = None if scores.is_inference() else identity(scores)
        if not self._any_dropped or (seen is not None and seen == self._seen):
            return True
        scores = scores.to(self.group_of.device)
        if scores.dtype.itemsize < 4:  # reductions over groups support float32 and float64 on every device
            scores = scores.float()
        bounds = scores.new_full((self.sizes.numel(),), float("inf"))
        kept = bounds.scatter_reduce(0, self.group_of, scores.masked_fill(~self.kept, float("inf")), "amin")
        dropped = (-bounds).scatter_reduce(0, self.group_of, scores.masked_fill(self.kept, -float("inf")), "amax")
        unchanged = bool((kept > dropped).all())
        self._seen = seen if unchanged else None
        return unchanged
