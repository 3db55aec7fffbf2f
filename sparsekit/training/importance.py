"""Steps: what a learnable mask does in the steps of a training; GradientImportance: a rule by which masks are learned."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from sparsekit.criteria.batches import Batch
from sparsekit.errors import InvalidValueError
from sparsekit.graph import UnitMask
from sparsekit.graph.index import wide
from sparsekit.tracing.inputs import find_tensors
from sparsekit.training.vectors import Gradients, UnitVectors, unit_tables

Widths: TypeAlias = float | Mapping[str, int]
"""Share of units kept in each group, or group name → units kept."""


def importance_targets(magnitudes: Tensor, sizes: Sequence[int], *, absolute: bool = False) -> Tensor:
    """Return the importance towards which units are pulled: float (J,) in [0, 1], float32 at least.

    It is the sigmoid of `magnitudes`, float (J,), Σ |θ| of each unit, which are first standardized in each group unless
    `absolute`. `sizes`: sizes of the groups.
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
    """Learns importance by gradient descent, after every step of the weights, on the loss and a regularizer.

    The gradient of the loss is that of each unit's gate. The regularizer λ‖Q − σ(|θ|_J)‖² pulls importance Q towards a target
    that follows the weights. The mask follows the order of importance. Both gradients are computed in closed form from the
    gradients of the weights. This is the rule of the paper, for comparisons with it.

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


class Steps:
    """What a learnable mask does in the steps of a training. This class is for a fixed mask; rules of learning override it."""

    learns = False  # whether importance is measured
    may_change = False  # whether a step may change the mask
    due = False  # whether the latest backward pass has not been used yet
    batches: Sequence[Batch] = ()  # data to refit layers on after a cut

    def run(self, vectors: UnitVectors, call: Callable[[], Any], examples: int) -> Any:
        """Run a forward pass of the narrow model, by `call`; a rule may measure importance in its backward pass."""
        del vectors, examples
        return call()

    def count(self, examples: int) -> None:
        """Record that a backward pass over some examples has run."""
        del examples
        self.due = True

    def take(self, scores: Tensor, vectors: UnitVectors, gradients: Gradients, scale: Tensor | None, group: Any) -> None:
        """Update importance `scores`, float (J,), in place. The other arguments are as in `GateSquares.take`."""

    def widths(self, now: Widths, scores: Tensor, mask: UnitMask) -> Widths | None:
        """Return the widths that the mask should have, given the present ones, `now`; None leaves the mask unchanged."""
        del scores, mask
        return now

    def refit(self, before: nn.Module, small: nn.Module, old: UnitMask, new: UnitMask) -> None:
        """Refit the layers of `small` whose inputs were removed when the mask changed from `old` to `new`, on the batches.

        `before`: the narrow model under the mask `old`.
        """

    def unmet(self, mask: UnitMask) -> str:
        """Return what is not done yet, in a sentence; empty if nothing is left."""
        del mask
        return ""

    def report(self, mask: UnitMask) -> Any:
        del mask

    def state(self) -> dict[str, Tensor]:
        """Return the state under keys and in shapes that never change."""
        return {}

    def load(self, state: Mapping[str, Tensor], scores: Tensor, version: int) -> None:
        """Continue from a state; if it is empty, begin with `scores`. `version`: the present version of the narrow model."""


class ImportanceSteps(Steps):
    """Applies `GradientImportance` in one training."""

    learns = may_change = True

    def __init__(self, settings: GradientImportance, units: int) -> None:
        self.settings = settings
        self._target = torch.zeros(units)
        self._gates = torch.zeros(units)  # ∂L/∂gate of each unit when last computed, 0 for dropped ones
        self._gates_of = -1  # the version of the narrow model for which they were computed
        self._age = 0

    @torch.no_grad()
    def take(self, scores: Tensor, vectors: UnitVectors, gradients: Gradients, scale: Tensor | None, group: Any) -> None:
        del group
        self.due = False
        rule, now = self.settings, self._age % self.settings.refresh_every == 0
        self._age += 1
        if now:
            absolute = rule.target == "absolute"
            self._target = importance_targets(vectors.magnitudes(), vectors.group_sizes, absolute=absolute).to(scores.dtype)
        if now or self._gates_of != vectors.narrow_model.version:
            gates, self._gates_of = vectors.gate_gradient(gradients), vectors.narrow_model.version
            self._gates = (gates if scale is None else gates / scale).to(self._target)
        target, gates = self._target.to(scores.device), self._gates.to(scores.device)  # the module may have been moved since
        gradient = (scores - target).mul_(2.0 * rule.strength).add_(gates)
        scores.sub_(gradient, alpha=rule.lr)

    def state(self) -> dict[str, Tensor]:
        return {"age": torch.tensor(self._age), "target": self._target.clone(), "gates": self._gates.clone()}

    def load(self, state: Mapping[str, Tensor], scores: Tensor, version: int) -> None:
        if state:
            self._age = int(state["age"])
            self._target, self._gates = (state[name].to(scores, copy=True) for name in ("target", "gates"))
        self._gates_of = version


def on_backward(outputs: Any, call: Callable[[], None]) -> None:
    """Call `call` once when a backward pass reaches the outputs of a model; immediately if they have no tensors."""
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
