"""LearnableSgd: a client learns weights and the importance of its units together, on a physically small model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor

from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict, UnitGraph
from sparsekit.training import GradientImportance, ImportanceRegularizer, LearnableMask
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.optimizer import Adjust
from sparsekit_fl.client.packing import Mask
from sparsekit_fl.config import TrainingConfig
from sparsekit_fl.options import Hint, NonNegative, Positive
from sparsekit_fl.policies.local import (
    Leaves,
    LocalPolicy,
    LocalResult,
    initial_accuracy,
    pull_towards,
    sgd,
    trained_leaves,
    with_epochs,
)
from sparsekit_fl.policies.mask import require_units
from sparsekit_fl.problem.problem import Problem


class PullToReceived:
    """`pull_towards` the received state, loaded into a mask that changes: the anchors of kept units are gathered again."""

    def __init__(
        self, masked: LearnableMask, leaves: Leaves, received: StateDict, strength: float, training: TrainingConfig
    ) -> None:
        self._narrow, self._leaves, self._received = masked.narrow_model, leaves, received
        self._strength, self._training = strength, training
        self._gather()

    def _gather(self) -> None:
        self._version = self._narrow.version
        anchors = self._narrow.gather(self._received, self._leaves)
        self._pull = pull_towards(self._leaves, anchors, self._strength, training=self._training)

    def __call__(self, gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        if self._version != self._narrow.version:
            self._gather()
        return self._pull(gradients)


def learning(masked: LearnableMask) -> Adjust:
    """Step importance by the gradients of the weights, before they are clipped."""

    def adjust(gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        masked.learn(gradients)
        return gradients

    return adjust


@dataclass(frozen=True, kw_only=True)
class LearnableSgd(LocalPolicy):
    """SGD on weights and importance: task loss + μ · distance to the received state + the importance term.

    The importance of a client's units is kept in its memory from round to round and starts at its target. The mask
    follows it after every step. Entries that were trained and then dropped within the round are not uploaded.

    Args:
        importance_lr: Learning rate of the importance; None takes that of the weights.
        term: The importance regulariser, λ‖Q − σ(|θ|_J)‖².
        proximal: μ, strength of ‖θ − ω‖².
        proximal_reduction: "mean" over the entries of the whole model, or their "sum".
        epochs_factor: Factor on the local epochs of the run. What narrow submodels save may be spent on more iterations.
        noise: Upper end of the uniform noise that the initial importance gets, so that equal targets do not tie.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), learnable sparse training, Algorithm 1, lines 13 to 23.
    """

    importance_lr: NonNegative | None = None
    term: ImportanceRegularizer = field(default_factory=ImportanceRegularizer)
    proximal: Annotated[NonNegative, Hint("0 switches it off")] = 1.0
    proximal_reduction: Literal["mean", "sum"] = "mean"
    epochs_factor: Annotated[Positive, Hint("1 takes the local epochs of the run")] = 1.0
    noise: NonNegative = 0.0

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        require_units(graph, type(self).__name__)

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        """Train under the learned mask at `ratio`; `mask` must be None, and the client's memory holds "importance", float (J,).

        Returns:
            The narrow state under the final mask. The first time, the metric `initial_accuracy` is that of the
            client's submodel of the global state of round 0, on a few of its training examples, a⁻¹ in the paper.

        Raises:
            InvalidValueError: a mask policy chose a mask already, or the importance diverged.
        """
        if mask is not None:
            raise InvalidValueError("LearnableSgd learns its own mask; use it with the mask policy Dense()")
        ctx = with_epochs(ctx, self.epochs_factor)
        metrics: Mapping[str, float] = {}
        if "importance" not in ctx.memory:
            metrics = initial_accuracy(ctx, self._loaded(ctx, ctx.initial_state(), ratio).model)
        masked = self._loaded(ctx, start, ratio)
        leaves = trained_leaves(masked)
        adjusts: list[Adjust] = [learning(masked)]
        batches = ctx.batches()
        if self.proximal:
            adjusts.append(PullToReceived(masked, leaves, start, self._pull(start, masked), ctx.training))
        log = sgd(ctx, leaves, batches, adjusts)
        final = masked.unit_mask()
        ctx.memory["importance"] = masked.importance_vector().cpu()
        return LocalResult.of(ctx, final, log, metrics=metrics)

    def _loaded(self, ctx: ClientContext, start: StateDict, ratio: float) -> LearnableMask:
        """Load the client's mask, with its importance."""
        rate = ctx.training.lr if self.importance_lr is None else self.importance_lr
        rule = GradientImportance(regularizer=self.term, explore=0.0, lr=rate)
        importance = ctx.memory.get("importance")
        if importance is not None:
            importance = torch.as_tensor(importance)
        ctx.masked.load(start, ratio=ratio, importance=importance, learning=rule)
        if importance is None and self.noise:
            targets = ctx.masked.importance_vector()
            noise = torch.from_numpy(ctx.rng.uniform(0.0, self.noise, targets.numel()))
            ctx.masked.load(start, importance=targets + noise.to(targets))
        return ctx.masked

    def _pull(self, start: StateDict, masked: LearnableMask) -> float:
        """Return the factor of (θ − ω) in the gradient, 2μ or 2μ / entries."""
        entries = 1 if self.proximal_reduction == "sum" else sum(start[name].numel() for name in masked.named_weights())
        return 2.0 * self.proximal / max(1, entries)
