"""UnitVectors: importance gradient, magnitudes and mask check of all groups as one vector.

Small steps are limited by Python, not by arithmetic, so each operation runs once over all units of a model. Vectors over
all units have length J, in the order of the graph's groups.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from sparsekit.criteria.weights import own_slices, unit_magnitudes
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import group_order
from sparsekit.graph.index import StateDict, wide
from sparsekit.graph.mask import UnitMask
from sparsekit.surgery.optimizer_state import HasState
from sparsekit.training.narrow_model import NarrowModel


def split_units(graph: UnitGraph, flat: Tensor) -> dict[str, Tensor]:
    """Views of a vector over all units, float (J,), by group: group name → (units,)."""
    parts = flat.split([group.size for group in graph.groups.values()])
    return dict(zip(graph.groups, parts, strict=True))


# Made once: a table that is made on the CPU would cross to the device of the model in every step.
@lru_cache(maxsize=256)
def unit_tables(sizes: tuple[int, ...], device: torch.device | None) -> tuple[Tensor, Tensor]:
    """Return the group of each unit, int64 (J,), and the size of each group, int64 (groups,)."""
    with torch.inference_mode(False):
        counts = torch.tensor(sizes, dtype=torch.long)
        return torch.arange(len(sizes)).repeat_interleave(counts).to(device), counts.to(device)


class Reader:
    """A leaf axis whose positions belong to units: sums over the other axes are added to those units."""

    def __init__(self, leaf: nn.Parameter, dim: int, name: str = "", units: Tensor | None = None) -> None:
        """Set up.

        Args:
            leaf: The leaf.
            dim: The axis.
            name: State-dict key of the leaf.
            units: int64 (dense size,), the unit of each dense position; J where none.
        """
        self.leaf = leaf
        self.dim = dim
        self.name = name
        self.units = units

    def products(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """Return Σ gradient · weight at each position along the axis: (narrow size,)."""
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
        """Return Σ |weight| at each position along the axis."""
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

    Change the mask through `set_mask`, and call `reload` after `load` of the narrow model.
    """

    def __init__(self, narrow_model: NarrowModel) -> None:
        self.narrow_model = narrow_model
        graph = narrow_model.graph
        self.offsets = group_order(graph.groups.values())
        self.total = graph.units
        self._leaves = narrow_model.named_parameters()
        # All tables are on the device of the model, so that a step copies nothing between devices.
        device = next((leaf.device for leaf in self._leaves.values()), None)
        self.group_of, self.sizes = unit_tables(tuple(group.size for group in graph.groups.values()), device)
        self._consumers, self._producers = self._readers(gated=True), self._readers(gated=False)
        self.reload()

    def _readers(self, *, gated: bool) -> list[Reader]:
        """Return readers of the gated entries, or of the units' own parameters."""
        graph = self.narrow_model.graph
        wanted: dict[tuple[str, int], Tensor] = {}
        for name, group in graph.groups.items():
            for piece in group.slices if gated else own_slices(group, self._leaves):
                if piece.name in self._leaves and (piece.gated or not gated):
                    empty = torch.full((graph.shapes[piece.name][piece.dim],), self.total, dtype=torch.int64)
                    units = torch.arange(group.size) + self.offsets[name]
                    table = wanted.setdefault((piece.name, piece.dim), empty)
                    table[piece.index.reshape(-1)] = units.repeat_interleave(piece.index.shape[1])
        # Vectors after matrices, so that the vectors' values come from one fused call.
        ordered = sorted(wanted.items(), key=lambda item: self._leaves[item[0][0]].dim() == 1)
        return [Reader(self._leaves[name], dim, name, units) for (name, dim), units in ordered]

    def set_mask(self, mask: UnitMask, optimizers: Sequence[HasState] = ()) -> None:
        """Change the mask of the narrow model and follow it.

        A mask moves entries between the narrow and the dense copy and changes none, so each unit keeps its magnitude and
        nothing dense has to be read.
        """
        full = self.magnitudes()
        self.narrow_model.set_mask(mask, optimizers)
        self._follow(full)

    def reload(self, magnitudes: Tensor | None = None) -> None:
        """Follow the narrow model after its `load`, whose state has these `magnitudes`; they are computed if not given."""
        self._follow(self.magnitudes_of(self.narrow_model.dense_state()) if magnitudes is None else magnitudes)

    def magnitudes_of(self, dense: StateDict) -> Tensor:
        """Return Σ |θ| over each unit's own parameters in a dense state: float (J,), on the device of the tables."""
        leaves = {name: dense[name].detach().to(self.group_of.device) for name in self._leaves}
        return torch.cat([unit_magnitudes(group, leaves) for group in self.narrow_model.graph.groups.values()])

    def _follow(self, full: Tensor) -> None:
        mask, device = self.narrow_model.mask, self.group_of.device
        kept = torch.cat([mask[name].cpu() for name in self.offsets])
        self._any_dropped = not bool(kept.all())
        self.kept = kept.to(device)
        """bool (J,)."""
        self.kept_units = kept.nonzero().reshape(-1).to(device)
        """int64 (kept,), ascending."""
        self._consumer_units, self._producer_units = (
            _cat([self._narrow_units(reader) for reader in readers], device) for readers in (self._consumers, self._producers)
        )
        # Kept units have weights that read dropped units; they do not change before the next change of the mask.
        self._still = full - self._narrow_magnitudes()

    def _narrow_units(self, reader: Reader) -> Tensor:
        """Return the unit of each narrow position: int64 (narrow size,); J where none."""
        assert reader.units is not None
        return reader.units[self.narrow_model.positions(reader.name)[reader.dim]]

    def _sums(self, values: list[Tensor], units: Tensor) -> Tensor:
        """Add the values at all positions of some readers to their units: float (J,)."""
        flat = torch.cat(values)
        return flat.new_zeros(self.total + 1).index_add_(0, units, flat)[:-1]

    def gate_gradient(self, gradients: Mapping[Tensor, Tensor] | None = None) -> Tensor:
        """Return ∂L/∂gate of each kept unit, 0 for the others: float (J,).

        Σ gradient · weight over the gated entries of the unit, which the backward pass has already computed: leaf → gradient,
        or None for `.grad` of the leaves.

        Source: first-order Taylor importance, Molchanov et al., CVPR 2019; straight-through on kept units.
        """
        return self._sums([_products(reader, gradients) for reader in self._consumers], self._consumer_units)

    def magnitudes(self) -> Tensor:
        """Return Σ |θ| over each unit's own parameters in the dense copy, |θ|_J in the paper: float (J,).

        Only the narrow entries are read; all others are as they were at the last change of the mask.
        """
        return self._still + self._narrow_magnitudes()

    def unchanging_sums(self) -> Tensor:
        """Return the part of the magnitudes that is not in narrow entries, rounding included: float (J,), for
        `restore_sums`."""
        return self._still.clone()

    def restore_sums(self, sums: Tensor) -> None:
        """Continue from the `unchanging_sums` of an earlier run with the same bits, unless they belong to other weights."""
        if sums.shape == self._still.shape:
            sums = sums.to(self._still)
            if torch.allclose(sums, self._still, rtol=1e-5, atol=1e-6 * float(self.magnitudes().max())):
                self._still = sums

    def _narrow_magnitudes(self) -> Tensor:
        """Return Σ |θ| over the narrow entries of each kept unit, 0 for the others: float (J,)."""
        vectors = [wide(reader.leaf.detach()) for reader in self._producers if reader.leaf.dim() == 1]
        values = [reader.magnitudes() for reader in self._producers if reader.leaf.dim() > 1]
        if vectors:
            values.append(torch.cat(vectors).abs_())
        return self._sums(values, self._producer_units)

    def mask_unchanged(self, scores: Tensor) -> bool:
        """Tell whether the mask is still that of the largest scores, float (J,) on any device, in every group, without sorting.

        True while the least kept score exceeds the largest dropped one. False also where they are equal, and
        the caller then compares by index.
        """
        if not self._any_dropped:
            return True
        scores = scores.to(self.group_of.device)
        if scores.dtype.itemsize < 4:  # reductions over groups know float32 and float64 everywhere
            scores = scores.float()
        bounds = scores.new_full((self.sizes.numel(),), float("inf"))
        kept = bounds.scatter_reduce(0, self.group_of, scores.masked_fill(~self.kept, float("inf")), "amin")
        dropped = (-bounds).scatter_reduce(0, self.group_of, scores.masked_fill(self.kept, -float("inf")), "amax")
        return bool((kept > dropped).all())


def _cat(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.cat([part.to(device) for part in parts]) if parts else torch.zeros(0, dtype=torch.int64, device=device)
