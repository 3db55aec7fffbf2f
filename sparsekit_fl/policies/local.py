"""Local policies: how a client learns in a round."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from sparsekit.errors import InvalidValueError
from sparsekit.foreach import foreach_add, foreach_lerp_, foreach_sub
from sparsekit.graph import StateDict, WeightMask
from sparsekit.training import LearnableMask
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.loop import Batch, Batches, Step, TrainingLog
from sparsekit_fl.client.messages import WorkCost
from sparsekit_fl.client.optimizer import Adjust, SgdStep, TorchStep, make_step
from sparsekit_fl.client.packing import Mask, mask_state
from sparsekit_fl.config import TrainingConfig
from sparsekit_fl.options import Hint, NonNegative
from sparsekit_fl.policies.context import Policy
from sparsekit_fl.problem.problem import Loss, Problem


@dataclass(frozen=True, eq=False, kw_only=True)
class LocalResult:
    """What a client learned.

    Args:
        state: The trained state: in the shapes that `mask` keeps where it is a unit mask, dense otherwise.
        mask: What was trained; only this is uploaded, unless the share policy says otherwise.
        log: Log of the training.
        extra: Further tensors to upload.
        metrics: Further numbers to upload.
        work: FLOPs, where they are not those of `log` under `mask`.
        module: A module that holds the result, ready to be scored; None where there is none.
        ratio: The executed ratio, where it is not the one that the ratio policy chose.
    """

    state: StateDict
    mask: Mask | None
    log: TrainingLog
    extra: StateDict = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    work: WorkCost | None = None
    module: nn.Module | None = None
    ratio: float | None = None

    @staticmethod
    def of(ctx: ClientContext, mask: Mask | None, log: TrainingLog, **others: Any) -> LocalResult:
        """Return the state of the client's narrow model as a result.

        Args:
            ctx: The client's.
            mask: What was trained.
            log: Log of the training.
            **others: The other fields.
        """
        return LocalResult(state=ctx.masked.narrow_state(), mask=mask, log=log, module=ctx.masked.model, **others)


class LocalPolicy(Policy):
    """How a client trains. A policy owns the step: it may take two batches, train a second model or change its mask."""

    def prepare(self, problem: Problem) -> Problem:
        """Change the problem before the run, for methods that need another architecture. The default changes nothing."""
        return problem

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        """Train on the client's data. The default is plain SGD.

        Args:
            ctx: The client's; `ctx.batches()` and `ctx.fit()` do the looping.
            start: The dense state to start from; read-only.
            mask: What to train; None for everything.
            ratio: The executed ratio.
        """
        return Sgd().train(ctx, start, mask, ratio)

    def trains_whole(self, mask: Mask | None) -> None:
        """Raise InvalidValueError where a mask policy chose what is trained, for methods that train whole models."""
        if mask is not None:
            raise InvalidValueError(f"{type(self).__name__} trains whole models; use it with the mask policy Dense()")


Leaves = Mapping[str, Tensor]
"""State-dict key → leaf of the narrow model, in the order of the state."""


def pull_towards(
    leaves: Leaves, anchors: Sequence[Tensor], strength: float, *, training: TrainingConfig | None = None
) -> Adjust:
    """Add strength · (leaf - anchor) to each gradient: the gradient of (strength / 2) · squared distance.

    Args:
        leaves: What trains.
        anchors: One tensor per leaf, in the same order.
        strength: Factor.
        training: The options of the steps. Where they are plain SGD the pull is one interpolation of the leaves in place,
            several times as fast as a longer gradient.
    """
    origin = dict(zip(leaves.values(), anchors, strict=True))

    def adjust(gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        pulled, targets = list(gradients), [origin[leaf] for leaf in gradients]
        if training is not None and training.is_plain:
            foreach_lerp_(pulled, targets, training.lr * strength)
            return gradients
        sums = foreach_add(list(gradients.values()), foreach_sub(pulled, targets), alpha=strength)
        return dict(zip(pulled, sums, strict=True))

    return adjust


def freeze_dropped(leaves: Leaves, mask: WeightMask) -> Adjust:
    """Set the gradients of the entries that a weight mask drops to zero."""
    kept = {leaf: mask[name].to(leaf) for name, leaf in leaves.items() if name in mask}
    return lambda gradients: {leaf: one * kept[leaf] if leaf in kept else one for leaf, one in gradients.items()}


def load_leaves(ctx: ClientContext, start: StateDict, mask: Mask | None) -> dict[str, Tensor]:
    """Load a state into the narrow model: units outside a unit mask are cut away, entries outside a weight mask are zero.

    Args:
        ctx: The client's.
        start: The dense state.
        mask: What is trained; None for everything.

    Returns:
        The leaves that train.
    """
    if isinstance(mask, WeightMask):
        start = mask_state(ctx.graph, mask, start)
    ctx.load(start, mask)
    return trained_leaves(ctx.masked)


def trained_leaves(masked: LearnableMask) -> dict[str, Tensor]:
    """State-dict key → narrow leaf, of those that train."""
    return {name: leaf for name, leaf in masked.named_weights().items() if leaf.requires_grad}


def with_epochs(ctx: ClientContext, epochs_factor: float) -> ClientContext:
    """Return the context with another number of local epochs.

    It is `epochs_factor` times that of the run, rounded to the nearest whole number (halves up), at least 1: 1.4 of 5 is 7.
    """
    if epochs_factor == 1.0:
        return ctx
    epochs = max(1, math.floor(epochs_factor * ctx.training.local_epochs + 0.5))
    return dataclasses.replace(ctx, training=dataclasses.replace(ctx.training, local_epochs=epochs))


def initial_accuracy(ctx: ClientContext, module: nn.Module) -> dict[str, float]:
    """Score what a client trains for the first time, in the state of round 0.

    A few of its training examples count: what is scored for a hundredth of the FLOPs of the training. They are drawn by the
    generator of the ratio, whose bandits learn from the result, so that batches are those of any other method.

    Args:
        ctx: The client's, with the epochs that it will train.
        module: The client's submodel of that state.

    Returns:
        `initial_accuracy`, where the problem has an accuracy.
    """
    size = len(ctx.client.data.train)
    count = max(1, 3 * ctx.training.local_epochs * size // 100)  # a backward pass costs two forward ones
    sample = torch.from_numpy(ctx.rngs["ratio"].permutation(size))[:count].sort().values
    score, weight = ctx.score(module, "train", positions=sample).get("accuracy", (0.0, 0.0))
    return {"initial_accuracy": score / weight} if weight else {}


def sgd(ctx: ClientContext, leaves: Leaves, batches: Batches, adjusts: Sequence[Adjust] = ()) -> TrainingLog:
    """Train leaves of the narrow model.

    Args:
        ctx: The client's.
        leaves: What trains; leaves that are not given stay as they are.
        batches: The epochs.
        adjusts: Changes of the gradients, one after the other, before clipping.
    """
    update = make_step(ctx.training, leaves.values(), steps=batches.steps)
    return ctx.fit(ctx.masked.model, batches, local_step(ctx.masked, ctx.problem.loss, update, adjusts))


def local_step(masked: LearnableMask, loss_of: Loss, update: SgdStep | TorchStep, adjusts: Sequence[Adjust] = ()) -> Step:
    """Return the step of every method that trains one model by one loss: the mask follows, then the weights learn."""
    module = masked.model
    if not masked.settled and update.parameters:
        masked.track(update.holder)

    def step(batch: Batch) -> tuple[Any, Tensor]:
        masked.sync()
        outputs = module(*batch.inputs)
        loss = loss_of(outputs, batch.targets)
        update(loss, adjusts)
        return outputs, loss

    return step


@dataclass(frozen=True)
class Sgd(LocalPolicy):
    """Stochastic gradient descent on the compact model, as `TrainingConfig` says.

    Args:
        proximal: Strength of the pull to where the round started: (proximal / 2) times the squared distance is added to
            the loss; 0 is FedAvg.

    Source: McMahan et al., AISTATS 2017; the proximal term is FedProx (Li et al., MLSys 2020).
    """

    proximal: Annotated[NonNegative, Hint("0 is plain SGD")] = 0.0

    def adjusts(self, ctx: ClientContext, leaves: Leaves, mask: Mask | None) -> list[Adjust]:
        """Return the changes to the gradients of each step: a method that adds a term to the loss adds its gradient here.

        Args:
            ctx: The client's.
            leaves: What trains, just loaded.
            mask: What is trained.
        """
        found: list[Adjust] = []
        if self.proximal:
            anchors = [leaf.detach().clone() for leaf in leaves.values()]
            found.append(pull_towards(leaves, anchors, self.proximal, training=ctx.training))
        if isinstance(mask, WeightMask):
            found.append(freeze_dropped(leaves, mask))
        return found

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        """Train the narrow model: units outside a unit mask are cut away, entries outside a weight mask are zero."""
        leaves = load_leaves(ctx, start, mask)
        log = sgd(ctx, leaves, ctx.batches(), self.adjusts(ctx, leaves, mask))
        return LocalResult.of(ctx, mask, log)
