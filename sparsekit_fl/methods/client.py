"""`Result` and `Model`: the outcome of a client's work, and the model that it deploys; `sgd` and other training steps."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sparsekit.graph import StateDict, UnitMask, WeightMask
from sparsekit.training import LearnableMask
from sparsekit_fl.client.context import ClientContext, full
from sparsekit_fl.client.fit import Adjust, Batch, Batches, LocalStep, Step, TrainingLog, make_step
from sparsekit_fl.client.messages import Cost
from sparsekit_fl.client.messages import Task as Task
from sparsekit_fl.config import TrainingConfig
from sparsekit_fl.packing import Kept, Mask, mask_state

Leaves = Mapping[str, Tensor]
"""State-dict key → leaf tensor of the narrow model, in the order of the state."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """The model that a client deploys and is scored with.

    Args:
        state: Dense, or narrow under a mask that drops nothing.
        mask: Units or entries to keep; None: all. The model is physically small if units are dropped.
        ratio: The share that the model keeps, in (0, 1], as in `Task.ratio`.
    """

    state: StateDict
    mask: Mask | None = None
    ratio: float = 1.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Result:
    """Outcome of a client's training in one round.

    Args:
        state: The trained state: narrow if `mask` is a unit mask, else dense.
        mask: What was trained; None for everything.
        ratio: The executed ratio, in (0, 1].
        extra: Further tensors to upload, by name.
        log: Losses and counts of the training.
        upload: Mask of the uploaded entries; None: `mask`.
        metrics: Further numbers to upload, by name.
        work: FLOPs, if they differ from `log` under `mask`.
    """

    state: StateDict
    mask: Mask | None = None
    ratio: float = 1.0
    extra: StateDict = field(default_factory=dict)
    log: TrainingLog
    upload: Mask | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    work: Cost | None = None


def sgd(client: ClientContext, task: Task, **how: Any) -> Result:
    """Load the state of a task into the client's model, train it under its mask by SGD, and return the result.

    Under a unit mask, the model is physically small. Under a weight mask, dropped entries are zero and stay zero.

    Args:
        client: The client's context.
        task: The state to start from, dense, and the mask; None trains everything.
        **how: The options of `descend`.

    Source: McMahan et al., AISTATS 2017.
    """
    return descend(client, task, load(client, task.state, task.mask), **how)


def descend(
    client: ClientContext,
    task: Task,
    leaves: Leaves,
    *,
    adjusts: Callable[[Leaves], Iterable[Adjust]] | None = None,
    pull: float = 0.0,
    anchor: StateDict | None = None,
    batches: Batches | None = None,
    forward: Step | None = None,
    only: Collection[str] | None = None,
    **training: Any,
) -> Result:
    """Train the client's loaded model under the mask of the task, and return the result.

    Args:
        client: The client's context.
        task: The state that training starts from, dense, and the mask to train under.
        leaves: The leaves of the model that train, from `load` or `trained_leaves`.
        adjusts: Takes the leaves that train (state-dict key → leaf), and returns functions that change the gradients of each
            step, applied in order. A method that adds a term to the loss adds its gradient here.
        pull: Adds pull / 2 · ‖θ − anchor‖² to the loss (FedProx, Li et al., MLSys 2020); 0 adds nothing.
        anchor: A dense state; None: the state that training starts from.
        batches: The batches to train on; None: new ones, with the run's settings.
        forward: Replaces the forward pass and the loss of a batch: returns the outputs, which metrics score, and the loss.
        only: State-dict keys of the entries that train; None: all. The others stay unchanged.
        **training: Options that replace those of `TrainingConfig`, as in `local_epochs=1`.
    """
    if training:
        client = replace(client, training=replace(client.training, **training))
    frozen = [leaf for name, leaf in leaves.items() if only is not None and name not in only]
    leaves = leaves if only is None else {name: leaf for name, leaf in leaves.items() if name in only}
    found = [] if adjusts is None else list(adjusts(leaves))
    if pull:
        start = mask_state(client.graph, task.mask, task.state) if isinstance(task.mask, WeightMask) else task.state
        shortcut = client.training if anchor is None else None
        found.append(pull_towards(client.masked, leaves, anchor or start, pull, training=shortcut))
    if isinstance(task.mask, WeightMask):
        kept = {leaf: task.mask[name].to(leaf) for name, leaf in leaves.items() if name in task.mask}
        found.append(lambda gradients: {leaf: one * kept[leaf] if leaf in kept else one for leaf, one in gradients.items()})
    batches = client.batches() if batches is None else batches
    module, loss_of = client.masked.model, client.problem.loss

    def plain(batch: Batch) -> tuple[Any, Tensor]:
        outputs = module(*batch.inputs)
        return outputs, loss_of(outputs, batch.targets)

    step = local_step(client.masked, forward or plain, make_step(client.training, leaves.values()), found)
    for leaf in frozen:
        leaf.requires_grad_(False)
    try:
        log = client.fit(batches, step)
    finally:
        for leaf in frozen:
            leaf.requires_grad_(True)
    return Result(state=client.masked.narrow_state(), mask=task.mask, ratio=task.ratio, log=log)


def load(client: ClientContext, start: StateDict, mask: Mask | None) -> dict[str, Tensor]:
    """Load a dense state into the narrow model, and return the leaves that train: state-dict key → leaf.

    Units outside a unit mask are removed, and entries outside a weight mask become zero; None keeps everything.
    """
    if isinstance(mask, WeightMask):
        start = mask_state(client.graph, mask, start)
    client.load(start, mask)
    return trained_leaves(client.masked)


@dataclass(frozen=True, eq=False)
class _Narrower:
    """A submodel inside another one: a module of its sizes, and state-dict key → (axis, positions in the wider entry)."""

    widest: UnitMask
    mask: UnitMask
    module: nn.Module
    kept: Kept
    places: Mapping[str, list[tuple[int, Tensor]]]


_NARROWER: WeakKeyDictionary[LearnableMask, list[_Narrower]] = WeakKeyDictionary()
"""Narrow model of a process → what its clients use one after the other, for each pair of levels of the run."""


def _narrower(client: ClientContext, start: StateDict, widest: UnitMask, mask: UnitMask) -> _Narrower:
    known = _NARROWER.setdefault(client.masked, [])
    alike = [one for one in known if one.mask.counts() == mask.counts() and one.mask == mask]
    for one in alike:
        if one.widest.counts() == widest.counts() and one.widest == widest:
            return one
    if not alike:
        client.load(start, mask)
    module = alike[0].module if alike else client.masked.compact().train()
    outer, inner = client.graph.kept_indices(widest), client.graph.kept_indices(mask)
    places = {
        name: [(dim, torch.searchsorted(outer[name][dim], kept).to(client.device)) for dim, kept in axes.items()]
        for name, axes in inner.items()
    }
    known.append(_Narrower(widest, mask, module, Kept(client.graph, mask), places))
    return known[-1]


def narrower(client: ClientContext, start: StateDict, widest: UnitMask | None, mask: UnitMask) -> Callable[[Batch], Any]:
    """Return a function that runs a narrower submodel on slices of the widest model's weights, which receive its gradients.

    Load the widest model afterwards.
    """
    masked, own = client.masked, _narrower(client, start, widest or full(client.graph), mask)
    received = {name: start[name] for name, _ in own.module.named_buffers() if name in start}
    buffers = {name: buffer.to(client.device, copy=True) for name, buffer in own.kept.gather_all(received).items()}

    def outputs(batch: Batch) -> Any:
        parts: dict[str, Tensor] = {**masked.narrow_model.named_parameters()}
        for name in parts.keys() & own.places.keys():
            for dim, positions in own.places[name]:
                parts[name] = parts[name].index_select(dim, positions)
        parts |= buffers
        found = functional_call(own.module, parts, batch.inputs)
        buffers.update({name: parts[name] for name in buffers})  # a module may assign new tensors
        return found

    return outputs


def trained_leaves(masked: LearnableMask) -> dict[str, Tensor]:
    """Return state-dict key → leaf of the narrow model, for the leaves that train."""
    return {name: leaf for name, leaf in masked.narrow_model.named_parameters().items() if leaf.requires_grad}


def pull_towards(
    masked: LearnableMask, leaves: Leaves, anchor: StateDict, strength: float, *, training: TrainingConfig | None = None
) -> Adjust:
    """Return an adjust that adds strength · (leaf - anchor), the gradient of (strength / 2) · squared distance to `anchor`.

    Whenever the mask changes, the anchors of kept units are gathered again. If `training` is given and is plain SGD, the leaves
    are interpolated in place instead, which is several times as fast.
    """
    narrow, version = masked.narrow_model, -1
    origin: dict[Tensor, Tensor] = {}

    def adjust(gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        nonlocal version
        if version != narrow.version:
            version = narrow.version
            origin.update(zip(leaves.values(), narrow.gather(anchor, leaves), strict=True))
        if training is None or not training.is_plain:
            return {leaf: torch.add(one, leaf - origin[leaf], alpha=strength) for leaf, one in gradients.items()}
        for leaf in gradients:
            leaf.lerp_(origin[leaf], training.lr * strength)
        return gradients

    return adjust


def local_step(masked: LearnableMask, forward: Step, update: LocalStep, adjusts: Sequence[Adjust] = ()) -> Step:
    """Return a training step, which updates the weights, then the mask. `forward` returns outputs and loss."""
    if update.optimizer is not None:
        masked.add_optimizer(update.optimizer)

    def step(batch: Batch) -> tuple[Any, Tensor]:
        outputs, loss = forward(batch)
        update(loss, adjusts)
        masked.update_mask()
        return outputs, loss

    return step


def keep_model(client: ClientContext, result: Result) -> None:
    """Store the model that was just trained in the client's memory, for deployment."""
    own = {
        name: tensor.cpu() for name, tensor in result.state.items() if name not in client.frozen or name in client.request.state
    }
    client.memory["kept"] = {"round": client.round, "state": own, "ratio": result.ratio, "mask": result.mask}


def kept_model(client: ClientContext) -> Model | None:
    """Return the model that `keep_model` stored; None before that."""
    memory = client.memory.get("kept")
    if memory is None:
        return None
    mask, initial = memory["mask"], client.initial_state()
    # Dropped entries are never used, so they may hold any values of the right shape.
    own = Kept(client.graph, mask if isinstance(mask, UnitMask) else None).scatter_all(memory["state"], initial)
    return Model(state={**initial, **own}, mask=mask, ratio=memory["ratio"])
