"""GradientImportance: importance is a parameter that the optimiser steps and a regulariser pulls; the paper's rule."""

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
from sparsekit.training.rule import Learning, MaskedModule, Rule, check_explore
from sparsekit.training.unit_vectors import split_units
from sparsekit.training.widening import straight_through_gates


@dataclass(frozen=True, kw_only=True)
class GradientImportance(Learning):
    """Importance is a parameter: it is stepped along the gradient of each unit's gate, and a regulariser pulls it.

    The mask follows after every step in which the order of importance changed. By default the optimiser steps importance: add
    `masked.penalty()` to the loss, and keep importance out of weight decay with `masked.param_groups()`. With a rate of its own
    the rule steps it by plain gradient descent, which is faster, as both gradients are computed in closed form from those of
    the weights; `penalty()` is then 0, and optimisers need not know importance.

    ```python
    masked = sk.LearnableMask(model, (x,), ratio=0.25, learning=sk.GradientImportance(lr=0.02))
    optimizer = torch.optim.AdamW(masked.weights())
    ```

    Args:
        regularizer: The regulariser behind `penalty()`.
        explore: Share of extra work, in [0, 1]. Every n-th training pass runs on the dense model, with n such that this
            costs about `explore` more. The outputs are the same; dropped units get the gradient of their gate, times n.
            With 0 they learn from the regulariser alone.
        lr: Learning rate of importance; None leaves its step to the optimiser. Where gradients of the weights are clipped, call
            `masked.update_importance()` before.
        refresh_every: With `lr`, importance takes a step after every step of the weights, but its target and the gradient of
            the gates are computed from the weights only at every n-th step and after a change of the mask, and reused in
            between. 1 is the algorithm of the paper; computed every time, they take a tenth of the time of a small step.

    Raises:
        InvalidValueError: `explore` outside [0, 1], `lr` below 0 or infinite, or `refresh_every` below 1.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), learnable sparse training; straight-through on kept units.
    """

    regularizer: ImportanceRegularizer = field(default_factory=ImportanceRegularizer)
    explore: float = 0.1
    lr: float | None = None
    refresh_every: int = 4

    def __post_init__(self) -> None:
        check_explore(self.explore)
        if not isinstance(self.refresh_every, int) or self.refresh_every < 1:
            raise InvalidValueError(f"refresh_every must be a whole number >= 1, got {self.refresh_every!r}")
        if self.lr is not None and not 0.0 <= self.lr < math.inf:
            raise InvalidValueError(f"lr must be a finite number >= 0 or None, got {self.lr}")

    def rule(self, masked: MaskedModule) -> FollowScores:
        if masked.widths.budget is not None and is_learned(masked.criterion):
            raise InvalidValueError(
                "budget= needs importance that can be compared between groups, which GradientImportance does not learn, so that"
                " widths would never move; use learning=LossImportance(…), or ratio="
            )
        return FollowScores(self, masked)


class FollowScores(Rule):
    """Let the mask follow the scores of its criterion: after every step if it learns, else when asked."""

    def __init__(self, settings: GradientImportance, masked: MaskedModule) -> None:
        self.settings = settings
        self._learns = is_learned(masked.criterion)
        masked.scores.requires_grad_(self._learns)
        self.passes = 0
        self._explored = 0.0
        self._density = 1.0
        self._seen: tuple[object, ...] | None = None
        self._stepped = False
        self._learned = False
        self._target: Tensor | None = None
        self._gates: Tensor | None = None
        """∂L/∂gate of each unit, 0 of dropped ones, as it was last computed."""
        self._gates_of = -1
        """The version of the narrow model for which it was computed."""
        self._age = 0
        sizes = [group.size for group in masked.graph.groups.values()]
        self._sizes = sizes
        self._pull = 2.0 * settings.regularizer.weights(sizes, masked.scores)

    @property
    def converged(self) -> bool:
        return False

    @property
    def exploration_cost(self) -> float:
        return self._explored / max(1, self.passes)

    def call(self, masked: MaskedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.apply_pending(masked)
        explore = self._exploration(masked)
        by_autograd = self._learns and (self.settings.lr is None or explore or masked.distributed)
        if not (by_autograd and torch.is_grad_enabled() and masked.scores.requires_grad):
            return masked.narrow_model.run(args, kwargs)
        if explore:
            gates = straight_through_gates(masked.graph, masked.narrow_model.mask, masked.scores, explore)
            return masked.wide_passes.call(tuple(masked.graph.groups), args, kwargs, gates)[0]
        return masked.vectors.run_gated(masked.scores, args, kwargs)

    def _exploration(self, masked: MaskedModule) -> float:
        """Return n on every n-th training pass while a learned criterion drops units, else 0."""
        explore = self.settings.explore
        learned = self._learns and self._density < 1.0 and explore > 0.0
        if not (learned and masked.training and torch.is_grad_enabled()):
            return 0.0
        self.passes += 1
        # Work grows about as the entries do; dense work that costs `explore` of the narrow work done between.
        every = math.ceil(1.0 / (explore * self._density))
        if self.passes % every:
            return 0.0
        self._explored += 1.0 / self._density - 1.0
        return float(every)

    def apply_pending(self, masked: MaskedModule) -> None:
        """Follow where the ratio, or a count of changes in place, or a step of an optimiser tells of a change."""
        self._learned = False
        told = self._stepped or (masked.widths.target, *identity(masked.scores)) != self._seen
        if not told or masked.optimizers.frozen:  # in the middle of a step
            return
        ratio_stands = self._seen is not None and self._seen[0] == masked.widths.target
        if ratio_stands and not self._learns:
            self._mark_seen(masked)
        else:
            self._follow(masked, unless_it_stands=ratio_stands)

    def _mark_seen(self, masked: MaskedModule) -> None:
        self._seen = (masked.widths.target, *identity(masked.scores))
        self._stepped = False

    def recompute_mask(self, masked: MaskedModule) -> None:
        self._follow(masked, unless_it_stands=False)

    def _follow(self, masked: MaskedModule, *, unless_it_stands: bool) -> None:
        """Change the mask to the scores of the criterion, asked once; without sorting if it stands, as in most steps."""
        # What is made here outlives the call: tensors of inference mode could not be trained on later.
        with torch.inference_mode(False), torch.no_grad():
            source = f"{type(masked.criterion).__name__} scores"
            scores: Mapping[str, Tensor] | None = None
            fused = masked.scores.detach()
            if not isinstance(masked.criterion, Learned):
                generator = masked.generator
                if generator is None and not self._learns:
                    generator = torch_generator(np.random.default_rng(0))  # the same draws in every program
                weights = masked.narrow_model.dense_state()
                model = None if self._learns else masked.narrow_model.dense_model()
                context = ScoringContext(
                    importance=split_units(masked.graph, fused), weights=weights, generator=generator, model=model
                )
                scores = masked.criterion.scores(masked.graph, context)
                check_scores(masked.graph, scores, source)
                fused = torch.cat([scores[name] for name in masked.graph.groups])
            if not (unless_it_stands and masked.vectors.mask_unchanged(fused)):
                scores = split_units(masked.graph, fused) if scores is None else scores
                mask = mask_from_scores(masked.graph, scores, masked.widths.counts(), source=source)
                if mask != masked.narrow_model.mask:
                    masked.change_mask(mask)
                self._density = mask.density(masked.graph)
            self._mark_seen(masked)

    def _targets(self, masked: MaskedModule) -> Tensor:
        return self.settings.regularizer.targets(masked.vectors.magnitudes(), self._sizes).to(masked.scores.dtype)

    def _recent(
        self, masked: MaskedModule, gradients: Mapping[Tensor, Tensor] | None, scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the targets and the gates' gradient, computed again when due; the latter also after a change of the mask."""
        fused, due = masked.vectors, self._age % self.settings.refresh_every == 0
        self._age += 1
        if self._target is None or due:
            self._target = self._targets(masked)
        version = masked.narrow_model.version
        if self._gates is None or due or self._gates_of != version:
            gates, self._gates_of = fused.gate_gradient(gradients), version
            self._gates = (gates if scale is None else gates / scale).to(self._target)
        return self._target, self._gates

    def update_importance(
        self, masked: MaskedModule, gradients: Mapping[Tensor, Tensor] | None, scale: Tensor | None = None
    ) -> None:
        """Step importance, if the optimiser does not: both gradients in closed form, without a graph."""
        lr = self.settings.lr
        # Fused optimisers, and those that write to `.data`, leave no trace in the count of changes in place.
        self._stepped = self._learns
        if lr is None or self._learned or not self._learns:
            return
        self._learned = True
        with torch.no_grad():
            fused = masked.vectors
            scores = masked.scores.detach()
            target, gates = self._recent(masked, gradients, scale)
            gradient = (scores - target).mul_(self._pull).add_(gates)
            if masked.scores.grad is not None:  # of a pass of the dense model
                seen = masked.scores.grad if scale is None else masked.scores.grad / scale
                gradient.add_(seen.masked_fill(fused.kept, 0.0))
                masked.scores.grad = None
            scores.sub_(gradient, alpha=lr)

    def penalty(self, masked: MaskedModule) -> Tensor:
        if self.settings.lr is not None or not self._learns:
            return super().penalty(masked)
        self.apply_pending(masked)
        with torch.no_grad():
            targets = self._targets(masked)
        return (0.5 * self._pull * (masked.scores - targets).square()).sum()

    def state(self) -> dict[str, Tensor]:
        read = {"target": self._target, "gates": self._gates}
        kept = {name: tensor.clone() for name, tensor in read.items() if tensor is not None}
        return {"passes": torch.tensor(self.passes), "age": torch.tensor(self._age), **kept}

    def load(self, masked: MaskedModule, state: dict[str, Tensor]) -> None:
        self.passes = int(state.get("passes", self.passes))
        self._age = int(state.get("age", 0))
        self._target, self._gates = (
            None if name not in state else state[name].to(masked.scores, copy=True) for name in ("target", "gates")
        )
        self._gates_of = masked.narrow_model.version
        self._density = masked.narrow_model.mask.density(masked.graph)
        self._mark_seen(masked)

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        moved = function(self._pull)
        self._pull = self._pull.to(moved.device) if moved.dtype.itemsize < 4 else moved
        self._target, self._gates = (None if one is None else one.to(self._pull) for one in (self._target, self._gates))
