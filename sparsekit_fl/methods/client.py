"""Training on a client: `sgd`, with what methods add to its gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from sparsekit.graph import StateDict, WeightMask
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.loop import Batches
from sparsekit_fl.client.optimizer import Adjust
from sparsekit_fl.methods.task import Result, Task
from sparsekit_fl.policies.local import Leaves, freeze_dropped, load_leaves, pull_towards
from sparsekit_fl.policies.local import sgd as train_leaves
from sparsekit_fl.problem.problem import Loss


def adapted(client: ClientContext, *, loss: Loss | None = None, **training: Any) -> ClientContext:
    """Return the same client with another loss, or with other options of `TrainingConfig`."""
    if training:
        client = dataclasses.replace(client, training=dataclasses.replace(client.training, **training))
    return client if loss is None else dataclasses.replace(client, problem=dataclasses.replace(client.problem, loss=loss))


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
