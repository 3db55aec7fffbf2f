"""Training on a client: `sgd`, with what methods add to its gradients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit.foreach import foreach_add, foreach_lerp_, foreach_sub
from sparsekit.graph import StateDict, WeightMask
from sparsekit.training import LearnableMask
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.fit import Adjust, Batch, Batches, SgdStep, Step, TorchStep, TrainingLog, make_step
from sparsekit_fl.client.packing import Mask, mask_state
from sparsekit_fl.config import TrainingConfig
from sparsekit_fl.methods.task import Result, Task
from sparsekit_fl.problem.problem import Loss

Leaves = Mapping[str, Tensor]
"""State-dict key → leaf of the narrow model, in the order of the state."""


def sgd(
    client: ClientContext,
    task: Task,
    *,
    adjusts: Callable[[Leaves], Iterable[Adjust]] | None = None,
    pull: float = 0.0,
    anchor: StateDict | None = None,
    batches: Batches | None = None,
    loss: Loss | None = None,
    **training: Any,
) -> Result:
    """Train the client's model by stochastic gradient descent, and return the result.

    Under a unit mask, the model is physically small. Under a weight mask, dropped entries are zero and stay zero.

    Args:
        client: The client's context.
        task: The state to start from, and the mask to train under.
        adjusts: Gives changes of the gradients of each step, applied in order, from the leaves that train: state-dict key →
            leaf. A method that adds a term to the loss adds its gradient here.
        pull: Adds pull / 2 · ‖θ − anchor‖² to the loss; 0 adds nothing.
        anchor: A dense state; None: the state that training starts from.
        batches: The batches to train on; None: new ones, as the options of the run say.
        loss: Replaces the loss of the problem.
        **training: Replace options of `TrainingConfig`, as in `local_epochs=1`.

    Source: McMahan et al., AISTATS 2017; the pull is that of FedProx (Li et al., MLSys 2020).
    """
    client = adapted(client, loss=loss, **training)
    leaves = load_leaves(client, task.state, task.mask)
    found = [] if adjusts is None else list(adjusts(leaves))
    if pull and anchor is None:
        start = [leaf.detach().clone() for leaf in leaves.values()]
        found.append(pull_towards(leaves, start, pull, training=client.training))
    elif pull and anchor is not None:
        found.append(pull_towards(leaves, [anchor[name].to(leaf) for name, leaf in leaves.items()], pull))
    if isinstance(task.mask, WeightMask):
        found.append(freeze_dropped(leaves, task.mask))
    log = train_leaves(client, leaves, client.batches() if batches is None else batches, found)
    return Result.of(client, task.mask, log)


def adapted(client: ClientContext, *, loss: Loss | None = None, **training: Any) -> ClientContext:
    """Return the same client with another loss, or with other options of `TrainingConfig`."""
    if training:
        client = dataclasses.replace(client, training=dataclasses.replace(client.training, **training))
    return client if loss is None else dataclasses.replace(client, problem=dataclasses.replace(client.problem, loss=loss))


def load_leaves(client: ClientContext, start: StateDict, mask: Mask | None) -> dict[str, Tensor]:
    """Load a state into the narrow model: units outside a unit mask are cut away, entries outside a weight mask are zero.

    Args:
        client: The client's.
        start: The dense state.
        mask: What is trained; None for everything.

    Returns:
        The leaves that train.
    """
    if isinstance(mask, WeightMask):
        start = mask_state(client.graph, mask, start)
    client.load(start, mask)
    return trained_leaves(client.masked)


def trained_leaves(masked: LearnableMask) -> dict[str, Tensor]:
    """State-dict key → narrow leaf, of those that train."""
    return {name: leaf for name, leaf in masked.named_weights().items() if leaf.requires_grad}


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


def train_leaves(client: ClientContext, leaves: Leaves, batches: Batches, adjusts: Sequence[Adjust] = ()) -> TrainingLog:
    """Train leaves of the narrow model.

    Args:
        client: The client's.
        leaves: What trains; leaves that are not given stay as they are.
        batches: The epochs.
        adjusts: Changes of the gradients, one after the other, before clipping.
    """
    update = make_step(client.training, leaves.values())
    return client.fit(client.masked.model, batches, local_step(client.masked, client.problem.loss, update, adjusts))


def local_step(masked: LearnableMask, loss_of: Loss, update: SgdStep | TorchStep, adjusts: Sequence[Adjust] = ()) -> Step:
    """Return the step of every method that trains one model by one loss: the mask follows, then the weights learn."""
    module = masked.model
    if not masked.converged and update.parameters:
        masked.add_optimizer(update.holder)

    def step(batch: Batch) -> tuple[Any, Tensor]:
        masked.unit_mask()
        outputs = module(*batch.inputs)
        loss = loss_of(outputs, batch.targets)
        update(loss, adjusts)
        return outputs, loss

    return step


def initial_accuracy(client: ClientContext, module: nn.Module) -> dict[str, float]:
    """Score what a client trains for the first time, in the state of round 0.

    A few of its training examples count: what is scored for a hundredth of the FLOPs of the training. They are drawn by the
    generator of the ratio, whose bandits learn from the result, so that batches are those of any other method.

    Args:
        client: The client's, with the epochs that it will train.
        module: The client's submodel of that state.

    Returns:
        `initial_accuracy`, where the problem has an accuracy.
    """
    size = len(client.client.data.train)
    count = max(1, 3 * client.training.local_epochs * size // 100)  # a backward pass costs two forward ones
    sample = torch.from_numpy(client.rngs["ratio"].permutation(size))[:count].sort().values
    score, weight = client.score(module, "train", positions=sample).get("accuracy", (0.0, 0.0))
    return {"initial_accuracy": score / weight} if weight else {}


def with_epochs(client: ClientContext, epochs_factor: float) -> ClientContext:
    """Return the context with another number of local epochs.

    It is `epochs_factor` times that of the run, rounded to the nearest whole number (halves up), at least 1: 1.4 of 5 is 7.
    """
    if epochs_factor == 1.0:
        return client
    epochs = max(1, math.floor(epochs_factor * client.training.local_epochs + 0.5))
    return dataclasses.replace(client, training=dataclasses.replace(client.training, local_epochs=epochs))
