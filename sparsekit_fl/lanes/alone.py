"""train_alone(): one lane trains by itself, with the kernels, and so the bits, of a client that has no lane."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparsekit._torch import foreach_add, foreach_lerp_, foreach_sub
from sparsekit_fl.lanes.model import BoundModel
from sparsekit_fl.lanes.stack import LaneStack
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.training.loop import Batch, TrainingLog, fit
from sparsekit_fl.training.optimizer import SgdStep

__all__ = ["train_alone"]


def train_alone(stack: LaneStack, number: int, problem: Problem) -> TrainingLog:
    """Train one lane over all its batches; its weights in the stack move in place.

    Where kernels are not shared, one client after the other keeps the weights of one client in the caches of a CPU.

    Args:
        stack: Loaded.
        number: The lane.
        problem: Loss and metrics.
    """
    model, lane = stack.model, stack.lanes[number]
    options = lane.training
    state = {name: stack.of(name)[number] for name in (*model.parameters, *model.buffers)}
    names = [name for name, trains in model.parameters.items() if trains]
    leaves = [state[name].detach().requires_grad_() for name in names]
    limits = {place: stack.kept[name][number] for place, name in enumerate(names) if name in stack.kept}
    anchors = [stack.anchors[name][number] for name in names] if lane.pull else []
    update = SgdStep(leaves, lr=options.lr, momentum=options.momentum, weight_decay=options.weight_decay, clip=options.clip)

    def adjust(gradients: list[Tensor], places: list[int]) -> list[Tensor]:
        if limits:
            gradients = [g * limits[place] if place in limits else g for g, place in zip(gradients, places, strict=True)]
        if not lane.pull:
            return gradients
        parameters, starts = [leaves[place] for place in places], [anchors[place] for place in places]
        if options.is_plain:
            foreach_lerp_(parameters, starts, options.lr * lane.pull)
            return gradients
        return list(foreach_add(gradients, foreach_sub(parameters, starts), alpha=lane.pull))

    module = BoundModel(model, {**state, **dict(zip(names, leaves, strict=True))}, divisor=lane.divisor)

    def step(batch: Batch) -> tuple[Any, Tensor]:
        outputs = module(*batch.inputs)
        loss = problem.loss(outputs, batch.targets)
        update(loss, adjust=adjust if limits or anchors else None)
        return outputs, loss

    return fit(module, lane.batches, step, metrics=problem.metrics, rng=lane.rng)
