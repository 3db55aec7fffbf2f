"""`Task`, `Result` and `Model`: what a client is asked, learns and deploys; `sgd`: how it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from sparsekit.graph import StateDict, WeightMask
from sparsekit.training import LearnableMask
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.fit import Adjust, Batch, Batches, SgdStep, Step, TorchStep, TrainingLog, make_step
from sparsekit_fl.client.messages import WorkCost
from sparsekit_fl.client.packing import Mask, mask_state
from sparsekit_fl.config import TrainingConfig
from sparsekit_fl.problem.problem import Loss
from sparsekit_fl.tensors import foreach_add, foreach_lerp_, foreach_sub

Leaves = Mapping[str, Tensor]
"""State-dict key → leaf of the narrow model, in the order of the state."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Task:
    """What one client trains in one round.

    Args:
        state: On the client, the dense state that training starts from: the global entries, and the client's private ones.
            Read-only. The server leaves it empty, since every client gets the global state.
        mask: A mask chosen by the server: only what it keeps is sent, and everything else arrives as zero. None: the whole
            model is sent.
        ratio: Share of the units to train, in (0, 1].
        extra: Further tensors for the client, by name.
    """

    state: StateDict = field(default_factory=dict)
    mask: Mask | None = None
    ratio: float = 1.0
    extra: StateDict = field(default_factory=dict)


@dataclass(frozen=True, eq=False, kw_only=True)
class Result:
    """What a client learned in one round.

    Args:
        state: The trained state: narrow if `mask` is a unit mask, else dense.
        mask: What was trained; None for everything.
        log: Losses and counts of the training.
        upload: What is uploaded, if that is not `mask`; None: `mask`.
        extra: Further tensors to upload, by name.
        metrics: Further numbers to upload, by name.
        work: FLOPs, if they are not those of `log` under `mask`.
        ratio: The executed ratio, in (0, 1]; None: that of the task.
        module: A module that holds `state`, ready to be scored; None if there is none.
    """

    state: StateDict
    mask: Mask | None
    log: TrainingLog
    upload: Mask | None = None
    extra: StateDict = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    work: WorkCost | None = None
    ratio: float | None = None
    module: nn.Module | None = None

    @staticmethod
    def of(client: ClientContext, mask: Mask | None, log: TrainingLog, **others: Any) -> Result:
        """Return the state of the client's narrow model as a result; `others` are the other fields."""
        return Result(state=client.masked.narrow_state(), mask=mask, log=log, module=client.masked.model, **others)


@dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """What a client deploys, and is scored with.

    Args:
        state: Narrow if `mask` is a unit mask, else dense.
        mask: What is kept; None for a whole model.
        ratio: The ratio that it was trained with; None if it is not sparse.
    """

    state: StateDict
    mask: Mask | None = None
    ratio: float | None = None


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
    if training:
        client = replace(client, training=replace(client.training, **training))
    if loss is not None:
        client = replace(client, problem=replace(client.problem, loss=loss))
    leaves = load_leaves(client, task.state, task.mask)
    found = [] if adjusts is None else list(adjusts(leaves))
    if pull and anchor is None:
        start = [leaf.detach().clone() for leaf in leaves.values()]
        found.append(pull_towards(leaves, start, pull, training=client.training))
    elif pull and anchor is not None:
        found.append(pull_towards(leaves, [anchor[name].to(leaf) for name, leaf in leaves.items()], pull))
    if isinstance(task.mask, WeightMask):
        kept = {leaf: task.mask[name].to(leaf) for name, leaf in leaves.items() if name in task.mask}
        found.append(lambda gradients: {leaf: one * kept[leaf] if leaf in kept else one for leaf, one in gradients.items()})
    log = train_leaves(client, leaves, client.batches() if batches is None else batches, found)
    return Result.of(client, task.mask, log)


def load_leaves(client: ClientContext, start: StateDict, mask: Mask | None) -> dict[str, Tensor]:
    """Load a dense state into the narrow model, and return the leaves that train.

    Units outside a unit mask are cut away, and entries outside a weight mask become zero; None keeps everything.
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
        leaves: The trained leaves.
        anchors: One tensor per leaf, in the same order.
        strength: Factor.
        training: The options of the steps. With plain SGD, the pull is one interpolation of the leaves in place, several times
            as fast as a longer gradient.
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


def train_leaves(client: ClientContext, leaves: Leaves, batches: Batches, adjusts: Sequence[Adjust] = ()) -> TrainingLog:
    """Train some leaves of the narrow model on batches; other leaves stay as they are.

    `adjusts` change the gradients, one after the other, before clipping.
    """
    update = make_step(client.training, leaves.values())
    return client.fit(client.masked.model, batches, local_step(client.masked, client.problem.loss, update, adjusts))


def local_step(masked: LearnableMask, loss_of: Loss, update: SgdStep | TorchStep, adjusts: Sequence[Adjust] = ()) -> Step:
    """Return the step of every method that trains one model by one loss: first the mask changes, then the weights."""
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
