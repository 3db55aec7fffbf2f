"""TracksOptimizers: what a learnable mask offers to the optimisers of its narrow weights."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sparsekit.errors import InvalidValueError
from sparsekit.surgery.optimizer_state import HasState
from sparsekit.training.execution import Execution
from sparsekit.training.optimizer_hooks import OptimizerSet, has_begun, holds, introduce

__all__ = ["TracksOptimizers"]


class TracksOptimizers:
    """Parameters for optimisers, whose state follows the mask."""

    model: nn.Module
    optimizers: OptimizerSet
    scores: nn.Parameter
    _execution: Execution
    _moved: bool

    def weights(self) -> list[nn.Parameter]:
        """The narrow weights: all `parameters()` but the importance, such as for `torch.nn.utils.clip_grad_norm_`."""
        return list(self.model.parameters())

    def param_groups(self, *, importance_lr: float | None = None, weight_decay: float | None = None) -> list[dict[str, Any]]:
        """Parameter groups for an optimiser that keep importance out of weight decay.

        An optimiser over plain `parameters()` decays importance as it does weights, and `clip_grad_norm_` over them counts
        the gradients of importance.

        ```python
        optimizer = torch.optim.AdamW(masked.param_groups(importance_lr=0.01, weight_decay=0.05), lr=1e-3)
        loss = F.cross_entropy(masked(x), y) + masked.penalty()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(masked.weights(), 1.0)
        optimizer.step()
        ```

        Args:
            importance_lr: Learning rate of the importance; None takes the optimiser's own.
            weight_decay: Weight decay of the weights; None takes the optimiser's own. That of importance is 0.

        Returns:
            Two groups: the weights, then the importance.

        Raises:
            InvalidValueError: a number below 0, infinite or NaN.
        """
        for name, value in (("importance_lr", importance_lr), ("weight_decay", weight_decay)):
            if value is not None and not 0.0 <= value < math.inf:
                raise InvalidValueError(f"{name} must be a finite number >= 0 or None, got {value}")
        weights: dict[str, Any] = {"params": self.weights()}
        importance: dict[str, Any] = {"params": [self.scores], "weight_decay": 0.0}
        if weight_decay is not None:
            weights["weight_decay"] = weight_decay
        if importance_lr is not None:
            importance["lr"] = importance_lr
        return [weights, importance]

    def leaves(self) -> list[nn.Parameter]:
        """The parameters whose optimisers follow a remask, and the importance."""
        return [*self.weights(), self.scores]

    def track(self, optimizer: HasState) -> None:
        """Let the state of `optimizer` follow the mask from now on.

        A torch optimiser is met at its first step and needs no such call, unless it has state before that, as one that was
        loaded or copied: then call this before the mask or the ratio changes. Any other object may keep tensors that follow the
        units: `state[leaf][name]`, each of the leaf's shape.

        Args:
            optimizer: Steps some of `parameters()`, or has state for them; held weakly.

        Raises:
            InvalidValueError: `optimizer` steps none of them.
        """
        if hasattr(optimizer, "param_groups") and not any(holds(optimizer, leaf) for leaf in self.leaves()):
            raise InvalidValueError(
                f"this {type(optimizer).__name__} steps no parameter of the mask; make it over masked.parameters()"
            )
        self.optimizers.add(optimizer)
        if isinstance(optimizer, Optimizer):
            introduce(optimizer)
        self._execution.narrow_model.claim_saved(optimizer)

    def held(self) -> AbstractContextManager[None]:
        """Keep the mask as it is within a block, in which an optimiser steps in two parts.

        ```python
        with masked.held():
            sam.first_step()
            F.cross_entropy(masked(x), y).backward()
            sam.second_step()
        ```
        """
        return self.optimizers.held()

    def meet(self, optimizer: Optimizer) -> None:
        """Called when an optimiser over `parameters()` steps for the first time, or was loaded.

        Raises:
            InvalidValueError: it has state, and the mask has changed since that may have been loaded.
        """
        unknown = self._moved and optimizer not in self.optimizers
        if unknown and any(has_begun(optimizer.state.get(leaf) or {}, leaf) for leaf in self.weights()):
            raise InvalidValueError(
                f"this {type(optimizer).__name__} has state from before the last change of the mask, which could not follow;"
                " call masked.track(optimizer) when its state is loaded"
            )
        self.track(optimizer)
