"""GradientImportance: importance is a parameter that the optimiser steps and a regulariser pulls; the paper's rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsekit._torch import identity
from sparsekit.allocation.choose import choose
from sparsekit.criteria.base import View, check_scores
from sparsekit.errors import InvalidValueError
from sparsekit.rng import torch_generator
from sparsekit.training.execution import CompactExecution
from sparsekit.training.optimizer_hooks import holds
from sparsekit.training.regularizer import ImportanceRegularizer
from sparsekit.training.rule import Host, split_units

__all__ = ["FollowScores", "GradientImportance", "targets_of"]


@dataclass(frozen=True, kw_only=True)
class GradientImportance:
    """Importance is a parameter: the optimiser steps it along the gradient of each unit's gate, a regulariser pulls it.

    The mask follows after every step in which the order of importance changed. Add `masked.penalty()` to the loss, and keep
    importance out of weight decay with `masked.param_groups()`.

    Args:
        regularizer: The regulariser behind `penalty()`.
        explore: Share of extra work, in [0, 1]. Every n-th training pass runs on the dense model, with n such that this
            costs about `explore` more. The outputs are the same; dropped units get the gradient of their gate, times n.
            With 0 they learn from the regulariser alone.

    Raises:
        InvalidValueError: `explore` outside [0, 1].

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), learnable sparse training; straight-through on kept units.
    """

    regularizer: ImportanceRegularizer = field(default_factory=ImportanceRegularizer)
    explore: float = 0.1

    def __post_init__(self) -> None:
        if not 0.0 <= self.explore <= 1.0:
            raise InvalidValueError(
                f"explore must be in [0, 1], got {self.explore}; it is a share of extra work, 0.1 is 10 % more"
            )

    def rule(self, host: Host) -> FollowScores:
        """Return a new rule for `host`."""
        return FollowScores(self, host)


def targets_of(host: Host, regularizer: ImportanceRegularizer) -> Tensor:
    """The target of every unit under the present weights: float (J,)."""
    return regularizer.targets(host.execution.magnitudes(), [group.size for group in host.graph.groups.values()])


class FollowScores:
    """Let the mask follow the scores of its criterion: after every step if it learns, else when asked."""

    def __init__(self, settings: GradientImportance, host: Host) -> None:
        self.settings = settings
        self.passes = 0
        self._explored = 0.0
        self._every = 0
        self._seen: tuple[object, ...] | None = None
        self._stepped = False
        self._judged = host.scores.detach().clone()

    @property
    def settled(self) -> bool:
        return False

    @property
    def explored(self) -> float:
        return self._explored / max(1, self.passes)

    def call(self, host: Host, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return host.execution.call(host.scores, args, kwargs, explore=self._exploration(host))

    def _exploration(self, host: Host) -> float:
        """Return n on every n-th training pass while a learned criterion drops units, else 0."""
        explore = self.settings.explore
        learned = host.criterion.learned and self._density < 1.0 and explore > 0.0
        if not (learned and host.training and torch.is_grad_enabled()):
            return 0.0
        self.passes += 1
        # Work grows about as the entries do; dense work that costs `explore` of the narrow work done between.
        every = math.ceil(1.0 / (explore * self._density))
        if self.passes % every:
            return 0.0
        self._explored += 1.0 / self._density - 1.0
        return float(every)

    def sync(self, host: Host) -> None:
        if self._announced(host) or self._differs(host):
            self._catch_up(host)

    def _announced(self, host: Host) -> bool:
        """Whether the ratio, or a count of changes in place, or a step of an optimiser tells of a change."""
        return self._stepped or (host.target, *identity(host.scores)) != self._seen

    def _differs(self, host: Host) -> bool:
        """Whether importance has other values than when the mask was made: writes to `scores.data` leave no other trace."""
        # Asked only where nothing was announced, so not in a training step.
        return host.criterion.learned and not torch.equal(host.scores.detach(), self._judged)

    def _catch_up(self, host: Host) -> None:
        if host.optimizers.hold:  # in the middle of a step
            return
        ratio_stands = self._seen is not None and self._seen[0] == host.target
        if ratio_stands and not host.criterion.learned:
            self._mark_seen(host)
        else:
            self._follow(host, unless_it_stands=ratio_stands)

    def _mark_seen(self, host: Host) -> None:
        self._seen = (host.target, *identity(host.scores))
        self._stepped = False
        if host.criterion.learned:
            self._judged = host.scores.detach().clone()

    def resample(self, host: Host) -> None:
        self._follow(host, unless_it_stands=False)

    def _follow(self, host: Host, *, unless_it_stands: bool) -> None:
        """Ask the criterion, once, and change the mask to its scores; in compact execution without sorting if it stands."""
        # What is made here outlives the call: tensors of inference mode could not be trained on later.
        with torch.inference_mode(False), torch.no_grad():
            execution, view = host.execution, self._view(host)
            scores, source = host.criterion.scores(host.graph, view), f"{type(host.criterion).__name__} scores"
            stands = False
            if unless_it_stands and isinstance(execution, CompactExecution):
                if scores is view.importance:
                    stands = execution.fused.stands(host.scores.detach())  # most steps: nothing to check or to join
                else:
                    check_scores(host.graph, scores, source)
                    stands = execution.fused.stands(execution.fused.fuse(scores))
            if not stands:
                mask = choose(host.graph, scores, host.counts(), source=source)
                if mask != execution.mask:
                    host.change(mask)
                self._density = mask.density(host.graph)
            self._mark_seen(host)

    def _view(self, host: Host) -> View:
        generator = host.generator
        if generator is None and not host.criterion.learned:
            generator = torch_generator(_fixed_rng())
        return View(
            importance=split_units(host.graph, host.scores.detach()),
            weights=host.execution.dense_state() if "weights" in host.criterion.needs else None,
            previous=host.execution.mask,
            generator=generator,
        )

    def penalty(self, host: Host) -> Tensor:
        if self._announced(host):  # the call of the model has already compared the values
            self._catch_up(host)
        with torch.no_grad():
            regularizer, sizes = self.settings.regularizer, [group.size for group in host.graph.groups.values()]
            targets = targets_of(host, regularizer).to(host.scores.dtype)
            weights = regularizer.weights(sizes, host.scores)
        return (weights * (host.scores - targets).square()).sum()

    def before_step(self, host: Host, optimizer: Optimizer) -> None:
        """Nothing: the optimiser steps importance as any other parameter."""

    def after_step(self, host: Host, optimizer: Optimizer) -> None:
        # Fused optimisers, and those that write to `.data`, leave no trace in the count of changes in place.
        self._stepped = self._stepped or holds(optimizer, host.scores)

    def state(self) -> dict[str, Tensor]:
        return {"passes": torch.tensor(self.passes)}

    def load(self, host: Host, state: dict[str, Tensor]) -> None:
        self.passes = int(state.get("passes", self.passes))
        self._density = host.execution.mask.density(host.graph)
        self._mark_seen(host)

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        self._judged = function(self._judged)


def _fixed_rng() -> np.random.Generator:
    """Return what a criterion that draws uses when no generator was given: the same draws in every program."""
    return np.random.default_rng(0)
