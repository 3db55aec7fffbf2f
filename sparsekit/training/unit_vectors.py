"""UnitVectors: importance gradient, magnitudes and mask check of all groups as one vector.

Small steps are limited by Python, not by arithmetic, so each operation runs once over all units of a model. Vectors over
all units have length J, in the order of the graph's groups.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from sparsekit.criteria.weights import own_slices, unit_magnitudes
from sparsekit.graph.groups import group_order
from sparsekit.graph.index import wide
from sparsekit.graph.mask import UnitMask
from sparsekit.graph.state import StateDict
from sparsekit.surgery.optimizer_state import HasState
from sparsekit.training.narrow_model import NarrowModel
from sparsekit.training.regularizer import unit_tables


class Reader:
    """A leaf axis whose narrow positions belong to slots: sums over the other axes land on those slots."""

    def __init__(self, leaf: nn.Parameter, dim: int) -> None:
        self.leaf = leaf
        self.dim = dim

    def products(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """Σ gradient · weight at each position along the axis: (narrow size,)."""
        kind = weight.device.type
        if torch.is_autocast_enabled(kind):  # backward() under autocast: CUDA would sum in half precision
            with torch.autocast(kind, enabled=False):
                return self.products(weight, gradient)
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

    def magnitudes(self) -> Tensor:
        """Σ |weight| at each position along the axis."""
        weight = wide(self.leaf.detach())
        if weight.dim() == 1:
            return weight.abs()
        if self.dim == 0:
            return weight.flatten(1).abs().sum(1)
        norms: Tensor = torch.linalg.vector_norm(weight, ord=1, dim=[d for d in range(weight.dim()) if d != self.dim])
        return norms


def _products(reader: Reader, gradients: Mapping[Tensor, Tensor] | None) -> Tensor:
    weight = reader.leaf.detach()
    gradient = reader.leaf.grad if gradients is None else gradients.get(reader.leaf)
    return wide(weight).new_zeros(weight.shape[reader.dim]) if gradient is None else reader.products(weight, gradient)


class UnitVectors:
    """Vectors over the units of a narrow model, from which importance is learned; they follow its mask.

    Remask the narrow model through `remask`, and call `reload` after its `load`.
    """

    def __init__(self, narrow_model: NarrowModel) -> None:
        self.narrow_model = narrow_model
        graph = narrow_model.graph
        self.offsets = group_order(graph.groups.values())
        self.total = graph.units
        self._leaves = narrow_model.named_parameters()
        # All tables lie where the model does, so that nothing crosses in a step.
        device = next((leaf.device for leaf in self._leaves.values()), None)
        self.group_of, self.sizes = unit_tables(tuple(group.size for group in graph.groups.values()), device)
        self._layout = -1
        self.reload()

    def remask(self, mask: UnitMask, optimizers: Sequence[HasState] = ()) -> None:
        """Remask the narrow model and follow it.

        A mask moves entries between the narrow and the dense copy and changes none, so each unit keeps its magnitude and
        nothing dense has to be read.
        """
        full = self.magnitudes()
        self.narrow_model.remask(mask, optimizers)
        self._follow(full)

    def reload(self, magnitudes: Tensor | None = None) -> None:
        """Follow the narrow model after its `load`, whose state has these `magnitudes`; they are read anew if not given."""
        self._follow(self.magnitudes_of(self.narrow_model.dense_state()) if magnitudes is None else magnitudes)

    def magnitudes_of(self, dense: StateDict) -> Tensor:
        """Σ |θ| over each unit's own parameters in a dense state: float (J,), where the tables lie."""
        leaves = {name: dense[name].detach().to(self.group_of.device) for name in self._leaves}
        return torch.cat([unit_magnitudes(group, leaves) for group in self.narrow_model.graph.groups.values()])

    def _follow(self, full: Tensor) -> None:
        narrow_model = self.narrow_model
        if self._layout != narrow_model.layout:
            self._build_layout()
            self._layout = narrow_model.layout
        self.slot_units = torch.cat([narrow_model.group_units(name) + offset for name, offset in self.offsets.items()])
        self.slot_units = self.slot_units.to(self.group_of.device)
        kept = torch.zeros(self.total, dtype=torch.bool, device=self.group_of.device)
        kept[self.slot_units] = True
        self.dropped_units = (~kept).nonzero().reshape(-1)
        self._slot_group = self.group_of[self.slot_units]
        self._dropped_group = self.group_of[self.dropped_units]
        # A kept filter still has entries that read dropped inputs; they do not change before the next remask.
        self._gated: list[tuple[str, nn.Parameter, list[Reader], list[Tensor]]] | None = None
        self._full = full
        self._still = full[self.slot_units] - self._narrow_magnitudes()

    def _build_layout(self) -> None:
        """Build the tables that hold until the counts change: the slot of each narrow position of each reader."""
        narrow_model, graph = self.narrow_model, self.narrow_model.graph
        first_slot, total = {}, 0
        for name in graph.groups:
            first_slot[name] = total
            total += narrow_model.group_units(name).numel()
        self._slots = total
        self._consumers, self._consumer_slots = self._readers(first_slot, gated=True)
        self._producers, self._producer_slots = self._readers(first_slot, gated=False)

    def _readers(self, first_slot: Mapping[str, int], *, gated: bool) -> tuple[list[Reader], Tensor]:
        """Readers of the gated entries, or of the units' own parameters, and the slot of each of their positions.

        Positions that belong to no unit go to an extra slot at the end.
        """
        narrow_model, graph = self.narrow_model, self.narrow_model.graph
        wanted: dict[tuple[str, int], set[str]] = {}
        for name, group in graph.groups.items():
            for piece in group.slices if gated else own_slices(group, self._leaves):
                if piece.name in self._leaves and (piece.gated or not gated):
                    wanted.setdefault((piece.name, piece.dim), set()).add(name)
        readers, maps = [], []
        # Vectors after matrices, so that the vectors' values come from one fused call.
        for (name, dim), owners in sorted(wanted.items(), key=lambda item: self._leaves[item[0][0]].dim() == 1):
            leaf = self._leaves[name]
            slot_of = torch.full((leaf.shape[dim],), self._slots, dtype=torch.int64)
            for owner, piece, table in narrow_model.slots(name).tables:
                if piece.dim == dim and owner in owners:
                    slots = torch.arange(table.shape[0]) + first_slot[owner]
                    slot_of[table.reshape(-1)] = slots.repeat_interleave(table.shape[1])
            readers.append(Reader(leaf, dim))
            maps.append(slot_of)
        return readers, torch.cat(maps).to(self.group_of.device)

    def _to_slots(self, values: list[Tensor], slot_of: Tensor) -> Tensor:
        fused = torch.cat(values)
        return fused.new_zeros(self._slots + 1).index_add_(0, slot_of, fused)[:-1]

    def gate_gradient(self, gradients: Mapping[Tensor, Tensor] | None = None) -> Tensor:
        """∂L/∂gate of each kept unit, in slot order: float (kept,).

        Σ gradient · weight over the gated entries of the unit, which the backward pass has already computed: leaf → gradient,
        or None for `.grad` of the leaves.

        Source: first-order Taylor importance, Molchanov et al., CVPR 2019; straight-through on kept units.
        """
        return self._to_slots([_products(reader, gradients) for reader in self._consumers], self._consumer_slots)

    def gated_leaves(self) -> list[tuple[str, nn.Parameter, list[Reader], list[Tensor]]]:
        """Leaves with gated entries: (module parameter name, leaf, readers, unit of each position; J where none)."""
        if self._gated is None:
            units = torch.cat([self.slot_units, self.slot_units.new_tensor([self.total])])
            maps = self._consumer_slots.split([reader.leaf.shape[reader.dim] for reader in self._consumers])
            by_leaf: dict[int, tuple[str, nn.Parameter, list[Reader], list[Tensor]]] = {}
            names = {id(leaf): name for name, leaf in self.narrow_model.module.named_parameters()}
            for reader, slot_of in zip(self._consumers, maps, strict=True):
                found = by_leaf.setdefault(id(reader.leaf), (names[id(reader.leaf)], reader.leaf, [], []))
                found[2].append(reader)
                found[3].append(units[slot_of])
            self._gated = list(by_leaf.values())
        return self._gated

    def magnitudes(self) -> Tensor:
        """Σ |θ| over each unit's own parameters in the dense copy, |θ|_J in the paper: float (J,).

        Only the narrow entries are read; what is dropped cannot have changed since the last remask.
        """
        return self._full.index_copy(0, self.slot_units, self._narrow_magnitudes() + self._still)

    def sums(self) -> Tensor:
        """What magnitudes are computed from beside the narrow entries, rounding included: float (2, J), for `restore_sums`."""
        return torch.stack([self._full, torch.zeros_like(self._full).index_copy_(0, self.slot_units, self._still)])

    def restore_sums(self, sums: Tensor) -> None:
        """Go on from the `sums` of an earlier run with the same bits, unless they belong to other weights."""
        if sums.shape != (2, self.total):
            return
        own, magnitudes = (self._full, self._still), self.magnitudes()
        self._full, still = sums.to(magnitudes)
        self._still = still[self.slot_units]
        if not torch.allclose(self.magnitudes(), magnitudes, rtol=1e-5, atol=1e-6 * float(magnitudes.max())):
            self._full, self._still = own

    def _narrow_magnitudes(self) -> Tensor:
        """Σ |θ| over the narrow entries of each kept unit, in slot order: float (kept,)."""
        vectors = [wide(reader.leaf.detach()) for reader in self._producers if reader.leaf.dim() == 1]
        values = [reader.magnitudes() for reader in self._producers if reader.leaf.dim() > 1]
        if vectors:
            values.append(torch.cat(vectors).abs_())
        return self._to_slots(values, self._producer_slots)

    def stands(self, scores: Tensor) -> bool:
        """Whether the mask is still that of the largest scores, float (J,) on any device, in every group, without sorting.

        True while the least kept score exceeds the largest dropped one. False also where they are equal, and
        the caller then compares by index.
        """
        if self.dropped_units.numel() == 0:
            return True
        scores = scores.to(self.group_of.device)
        if scores.dtype.itemsize < 4:  # reductions over groups know float32 and float64 everywhere
            scores = scores.float()
        groups = self.sizes.numel()
        infinity = float("inf")
        kept = scores.new_full((groups,), infinity)
        kept.scatter_reduce_(0, self._slot_group, scores[self.slot_units], "amin")
        dropped = scores.new_full((groups,), -infinity)
        dropped.scatter_reduce_(0, self._dropped_group, scores[self.dropped_units], "amax")
        return bool((kept > dropped).all())
