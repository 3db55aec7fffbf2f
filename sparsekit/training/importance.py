"""GradientImportance: a rule of learning for masks, and vectors over all units of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from sparsekit.criteria.weights import unit_magnitudes
from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict, UnitGraph, UnitMask, group_order
from sparsekit.graph.index import wide
from sparsekit.surgery.optimizer_state import HasState
from sparsekit.tracing.inputs import find_tensors
from sparsekit.training.narrow_model import NarrowModel

Gradients: TypeAlias = Mapping[Tensor, Tensor] | None
"""Weight → gradient; None reads `.grad` of the weights."""


def importance_targets(magnitudes: Tensor, sizes: Sequence[int], *, absolute: bool = False) -> Tensor:
    """Return the importance towards which units are pulled: float (J,) in [0, 1], float32 at least.

    It is the sigmoid of the magnitudes Σ |θ|, float (J,), themselves or standardized in each group; `sizes` of the groups.
    """
    values = wide(magnitudes)
    if not absolute:
        group_of, units = unit_tables(tuple(sizes), values.device)
        counts = units.to(values.dtype)
        mean = values.new_zeros(units.numel()).index_add_(0, group_of, values) / counts
        centred = values - mean[group_of]
        variance = values.new_zeros(units.numel()).index_add_(0, group_of, centred * centred) / counts
        values = centred / (variance.sqrt() + 1e-12)[group_of]
    return torch.sigmoid(values)


@dataclass(frozen=True, kw_only=True)
class GradientImportance:
    """Change importance after every step of the weights, along the gradient of each unit's gate and of a regularizer.

    The regularizer λ‖Q − σ(|θ|_J)‖² pulls importance Q towards a target that follows the weights. The mask follows the order of
    importance. Both gradients are computed in closed form from the gradients of the weights. This is the rule of the paper, for
    comparisons with it.

    Dropped units have no gradient, so they learn from the regularizer alone. The gradient of a kept gate vanishes where
    training converges. The pull to magnitudes then decides: with the defaults, the mask keeps the largest weights. To learn
    which units stay, use `LearnedNarrowing`.

    ```python
    masked = sk.LearnableMask(model, (x,), ratio=0.25, learning=sk.GradientImportance(lr=0.02))
    optimizer = torch.optim.AdamW(masked.parameters())
    ```

    Args:
        strength: λ in the paper.
        target: "standardized" subtracts each group's mean from the absolute sums and divides by the deviation before the
            sigmoid; "absolute" takes the sigmoid of the sums, as in the paper (close to 1 for every unit of a wide network).
        lr: Learning rate of importance. If you clip gradients of the weights, call `masked.update_importance()` before.
        refresh_every: The target and the gradients of the gates are computed at every n-th step and after a change of the mask,
            and reused in between. 1 is the algorithm of the paper; it adds a tenth to the time of a small step.

    Raises:
        InvalidValueError: `strength` or `lr` below 0 or infinite, another target, or `refresh_every` below 1.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), learnable sparse training; straight-through on kept units. The
        standardized target is ours.
    """

    strength: float = 1.0
    target: Literal["standardized", "absolute"] = "standardized"
    lr: float = 0.02
    refresh_every: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.refresh_every, int) or self.refresh_every < 1:
            raise InvalidValueError(f"refresh_every must be a whole number >= 1, got {self.refresh_every!r}")
        for name in ("strength", "lr"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0.0 <= value < math.inf:
                raise InvalidValueError(f"{name} must be a finite number >= 0, got {value!r}")
        if self.target not in ("standardized", "absolute"):
            raise InvalidValueError(f"target must be 'standardized' or 'absolute', got {self.target!r}")


class ImportanceSteps:
    """The steps of `GradientImportance` in one training."""

    def __init__(self, settings: GradientImportance, units: int) -> None:
        self.settings = settings
        self.due = False  # whether importance has not yet taken the step of the latest backward pass
        self._target = torch.zeros(units)
        self._gates = torch.zeros(units)  # ∂L/∂gate of each unit when last computed, 0 for dropped ones
        self._gates_of = -1  # the version of the narrow model for which they were computed
        self._age = 0

    def count(self, _examples: int) -> None:
        self.due = True

    @torch.no_grad()
    def take(self, scores: Tensor, vectors: UnitVectors, gradients: Gradients, scale: Tensor | None, _group: object) -> None:
        """Change `scores`, float (J,), in place. The arguments are as in `GateSquares.take`."""
        self.due = False
        rule, now = self.settings, self._age % self.settings.refresh_every == 0
        self._age += 1
        if now:
            absolute = rule.target == "absolute"
            self._target = importance_targets(vectors.magnitudes(), vectors.group_sizes, absolute=absolute).to(scores.dtype)
        if now or self._gates_of != vectors.narrow_model.version:
            gates, self._gates_of = vectors.gate_gradient(gradients), vectors.narrow_model.version
            self._gates = (gates if scale is None else gates / scale).to(self._target)
        target, gates = self._target.to(scores.device), self._gates.to(scores.device)  # the mask may have moved since
        gradient = (scores - target).mul_(2.0 * rule.strength).add_(gates)
        scores.sub_(gradient, alpha=rule.lr)

    def state(self) -> dict[str, Tensor]:
        """Return the state under keys and in shapes that never change."""
        return {"age": torch.tensor(self._age), "target": self._target.clone(), "gates": self._gates.clone()}

    def load(self, state: Mapping[str, Tensor], scores: Tensor, version: int) -> None:
        """Continue from a state, or begin if it is empty. `version`: of the narrow model, now."""
        if state:
            self._age = int(state["age"])
            self._target, self._gates = (state[name].to(scores, copy=True) for name in ("target", "gates"))
        self._gates_of = version


def on_backward(outputs: Any, call: Callable[[], None]) -> None:
    """Call once when a backward pass reaches the outputs of a model; at once if no tensor is found in them."""
    found, reached = find_tensors(outputs), list[bool]()

    def note(_: Tensor) -> None:
        if not reached:
            reached.append(True)
            call()

    if not found:
        call()
    for tensor in found:
        if tensor.requires_grad:
            tensor.register_hook(note)


def split_units(graph: UnitGraph, flat: Tensor) -> dict[str, Tensor]:
    """Return group name → (units,): views of a vector over all units, float (J,)."""
    parts = flat.split([group.size for group in graph.groups.values()])
    return dict(zip(graph.groups, parts, strict=True))


# Made once: a table that is made on the CPU would cross to the device of the model in every step.
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
    """Vectors over the units of a narrow model, float (J,) in the order of the graph's groups.

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
        """Return Σ |θ| over each unit's own parameters in a dense state, or the present one: float (J,), |θ|_J in the paper."""
        dense = self.narrow_model.dense_state() if dense is None else dense
        leaves = {name: dense[name].detach().to(self.group_of.device) for name in self._leaves}
        return torch.cat([unit_magnitudes(group, leaves) for group in self.narrow_model.graph.groups.values()])

    def follow(self) -> None:
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
        if not self._any_dropped:
            return True
        scores = scores.to(self.group_of.device)
        if scores.dtype.itemsize < 4:  # reductions over groups support float32 and float64 on every device
            scores = scores.float()
        bounds = scores.new_full((self.sizes.numel(),), float("inf"))
        kept = bounds.scatter_reduce(0, self.group_of, scores.masked_fill(~self.kept, float("inf")), "amin")
        dropped = (-bounds).scatter_reduce(0, self.group_of, scores.masked_fill(self.kept, -float("inf")), "amax")
        return bool((kept > dropped).all())
