"""GradientImportance: importance follows the gradients of the units' gates, and a regulariser pulls it; the paper's rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsekit._torch import identity
from sparsekit.allocation.masks import mask_from_scores
from sparsekit.criteria.base import ScoringContext, check_scores, is_learned
from sparsekit.criteria.orders import Learned
from sparsekit.errors import InvalidValueError
from sparsekit.rng import torch_generator
from sparsekit.training.regularizer import ImportanceRegularizer
from sparsekit.training.rule import Learning, MaskedModule, Rule
from sparsekit.training.unit_vectors import split_units


@dataclass(frozen=True, kw_only=True)
class GradientImportance(Learning):
    """Step importance along the gradient of each unit's gate, pulled by a regulariser, after every step of the weights.

    The mask follows where the order of importance has changed. Both gradients are computed in closed form from those of the
    weights, so optimisers need not know importance. Dropped units learn from the regulariser alone.

    ```python
    masked = sk.LearnableMask(model, (x,), ratio=0.25, learning=sk.GradientImportance(lr=0.02))
    optimizer = torch.optim.AdamW(masked.parameters())
    ```

    Args:
        regularizer: Pulls importance towards a target that follows the weights.
        lr: Learning rate of importance. Where gradients of the weights are clipped, call `masked.update_importance()` before.
        refresh_every: Importance takes a step after every step of the weights, but its target and the gradient of the gates
            are computed from the weights only at every n-th step and after a change of the mask, and reused in between. 1 is
            the algorithm of the paper; computed every time, they take a tenth of the time of a small step.

    Raises:
        InvalidValueError: `lr` below 0 or infinite, or `refresh_every` below 1.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), learnable sparse training; straight-through on kept units.
    """

    regularizer: ImportanceRegularizer = field(default_factory=ImportanceRegularizer)
    lr: float = 0.02
    refresh_every: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.refresh_every, int) or self.refresh_every < 1:
            raise InvalidValueError(f"refresh_every must be a whole number >= 1, got {self.refresh_every!r}")
        if not 0.0 <= self.lr < math.inf:
            raise InvalidValueError(f"lr must be a finite number >= 0, got {self.lr}")

    def rule(self, masked: MaskedModule) -> GradientImportanceRule:
        if masked.widths.budget is not None and is_learned(masked.criterion):
            raise InvalidValueError(
                "budget= needs importance that can be compared between groups, which GradientImportance does not learn, so that"
                " widths would never move; use learning=LossImportance(…), or ratio="
            )
        return GradientImportanceRule(self, masked)


class GradientImportanceRule(Rule):
    """Let the mask follow the scores of its criterion: after every step if it learns, else when asked."""

    def __init__(self, settings: GradientImportance, masked: MaskedModule) -> None:
        self.settings = settings
        self._learns = is_learned(masked.criterion)
        self._sizes = [group.size for group in masked.graph.groups.values()]
        self._seen: tuple[object, ...] | None = None
        """Widths and version of the scores for which the mask was last chosen."""
        self._learned = False
        """Whether importance has taken the step that goes with the latest pass."""
        self._target: Tensor | None = None
        self._gates: Tensor | None = None
        """∂L/∂gate of each unit, 0 of dropped ones, as it was last computed."""
        self._gates_of = -1
        """The version of the narrow model for which it was computed."""
        self._age = 0

    @property
    def converged(self) -> bool:
        return False

    def call(self, masked: MaskedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.apply_pending(masked)
        return masked.narrow_model.run(args, kwargs)

    def _now(self, masked: MaskedModule) -> tuple[object, ...]:
        return masked.widths.target, *identity(masked.scores)

    def apply_pending(self, masked: MaskedModule) -> None:
        self._learned = False
        now = self._now(masked)
        if now == self._seen or masked.optimizers.frozen:  # in the middle of a step
            return
        same_widths = self._seen is not None and self._seen[0] == now[0]
        if same_widths and not self._learns:
            self._seen = now
        else:
            self._follow(masked, unless_unchanged=same_widths)

    def recompute_mask(self, masked: MaskedModule) -> None:
        self._follow(masked, unless_unchanged=False)

    def _follow(self, masked: MaskedModule, *, unless_unchanged: bool) -> None:
        """Change the mask to the scores of the criterion, asked once; without sorting if it stays, as in most steps."""
        # What is made here outlives the call: tensors of inference mode could not be trained on later.
        with torch.inference_mode(False), torch.no_grad():
            source = f"{type(masked.criterion).__name__} scores"
            scores: Mapping[str, Tensor] | None = None
            flat = masked.scores
            if not isinstance(masked.criterion, Learned):
                generator = masked.generator
                if generator is None and not self._learns:
                    generator = torch_generator(np.random.default_rng(0))  # the same draws in every program
                weights = masked.narrow_model.dense_state()
                model = None if self._learns else masked.narrow_model.dense_model()
                importance = split_units(masked.graph, flat)
                context = ScoringContext(importance=importance, weights=weights, generator=generator, model=model)
                scores = masked.criterion.scores(masked.graph, context)
                check_scores(masked.graph, scores, source)
                flat = torch.cat([scores[name] for name in masked.graph.groups])
            if not (unless_unchanged and masked.vectors.mask_unchanged(flat)):
                scores = split_units(masked.graph, flat) if scores is None else scores
                mask = mask_from_scores(masked.graph, scores, masked.widths.counts(), source=source)
                if mask != masked.narrow_model.mask:
                    masked.change_mask(mask)
            self._seen = self._now(masked)

    def _recent(
        self, masked: MaskedModule, gradients: Mapping[Tensor, Tensor] | None, scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the targets and the gates' gradient, computed again when due; the latter also after a change of the mask."""
        vectors, due = masked.vectors, self._age % self.settings.refresh_every == 0
        self._age += 1
        if self._target is None or due:
            self._target = self.settings.regularizer.targets(vectors.magnitudes(), self._sizes).to(masked.scores.dtype)
        version = masked.narrow_model.version
        if self._gates is None or due or self._gates_of != version:
            gates, self._gates_of = vectors.gate_gradient(gradients), version
            self._gates = (gates if scale is None else gates / scale).to(self._target)
        return self._target, self._gates

    def update_importance(
        self, masked: MaskedModule, gradients: Mapping[Tensor, Tensor] | None, scale: Tensor | None = None
    ) -> None:
        if self._learned or not self._learns:
            return
        self._learned = True
        with torch.no_grad():
            target, gates = self._recent(masked, gradients, scale)
            gradient = (masked.scores - target).mul_(2.0 * self.settings.regularizer.strength).add_(gates)
            masked.scores.sub_(gradient, alpha=self.settings.lr)

    def state(self) -> dict[str, Tensor]:
        read = {"target": self._target, "gates": self._gates}
        return {"age": torch.tensor(self._age), **{name: each.clone() for name, each in read.items() if each is not None}}

    def load(self, masked: MaskedModule, state: dict[str, Tensor]) -> None:
        self._age = int(state.get("age", 0))
        self._target, self._gates = (
            None if name not in state else state[name].to(masked.scores, copy=True) for name in ("target", "gates")
        )
        self._gates_of = masked.narrow_model.version
        self._seen = self._now(masked)

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(function(tensor).device)

        self._target, self._gates = moved(self._target), moved(self._gates)
