"""LaneStep: one step of stochastic gradient descent of several clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from sparsekit._torch import (
    foreach_add,
    foreach_add_,
    foreach_lerp_,
    foreach_mul_,
    foreach_norm,
    foreach_sub,
    tree_map_only,
)
from sparsekit.rng import generator_scope
from sparsekit_fl.lanes.arrange import lane_of
from sparsekit_fl.lanes.lane import LaneLearner, Rows
from sparsekit_fl.lanes.stack import LaneStack
from sparsekit_fl.training.loop import Batch

__all__ = ["LaneStep"]


class LaneStep:
    """One step of several clients; the same numbers as a step of each by itself.

    Args:
        stack: Loaded.
        loss: (outputs, targets) → scalar.
        metric: (outputs, targets) → (sum, weight); None measures nothing.
        batched: Compute all lanes by one kernel; False takes lane after lane, which gives the bits of each client by itself.
    """

    def __init__(
        self,
        stack: LaneStack,
        *,
        loss: Callable[[Any, Tensor], Tensor],
        metric: Callable[[Any, Tensor], tuple[Any, Any]] | None,
        batched: bool,
    ) -> None:
        self._stack = stack
        self._loss = loss
        self._metric = metric
        self._batched = batched
        self._trained = [name for name, trains in stack.model.parameters.items() if trains]
        self._unmapped: list[Any] = []
        self.learner: LaneLearner | None = None
        self.generators: Sequence[torch.Generator] = ()
        """What the model draws from in each lane; empty where it draws nothing."""

    def __call__(self, lanes: Sequence[int], batches: Sequence[Batch]) -> tuple[Tensor, Tensor, Tensor]:
        """Take a step.

        Args:
            lanes: Who takes it, ascending.
            batches: The batch of each, all of one size.

        Returns:
            The loss of each lane, and sum and weight of the metric, float (lanes,) each.
        """
        if not self._batched:
            return self._in_turn(lanes, batches)
        stack = self._stack
        rows = _rows(lanes, stack.device)
        buffers = {name: tensor[rows] for name, tensor in stack.buffers.items()}
        losses, measured, gradients = self._together(rows, buffers, batches)
        with torch.no_grad():
            for name, tensor in buffers.items():
                if isinstance(rows, Tensor):
                    stack.buffers[name][rows] = tensor
            # After the buffers, which move to other units where the masks change.
            self._move(rows, gradients)
        return losses, measured[:, 0], measured[:, 1]

    def _together(
        self, rows: Rows, buffers: dict[str, Tensor], batches: Sequence[Batch]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Losses, metric and gradients by one kernel for all lanes."""
        stack = self._stack
        inputs = tuple(torch.stack(each) for each in zip(*(batch.inputs for batch in batches), strict=True))
        targets = torch.stack([batch.targets for batch in batches])
        leaves = {name: stack.parameters[name][rows].detach().requires_grad_() for name in self._trained}
        fixed = {name: tensor[rows] for name, tensor in stack.parameters.items() if name not in leaves}
        divisors = None if stack.divisors is None else stack.divisors[rows]
        outputs = stack.model({**leaves, **fixed, **buffers}, inputs, divisors)
        losses = self._each(self._loss, outputs, targets)
        found = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
        with torch.no_grad():
            measured = self._each(self._measure, outputs, targets)
        return losses.detach(), measured, {name: g for name, g in zip(leaves, found, strict=True) if g is not None}

    def _in_turn(self, lanes: Sequence[int], batches: Sequence[Batch]) -> tuple[Tensor, Tensor, Tensor]:
        """The same, lane after lane, with the kernels of a client that trains by itself."""
        stack = self._stack
        losses, measured = [], []
        for number, batch in zip(lanes, batches, strict=True):
            state = {name: tensor[number] for name, tensor in (*stack.parameters.items(), *stack.buffers.items())}
            leaves = {name: state[name].detach().requires_grad_() for name in self._trained}
            divisor = 1.0 if stack.divisors is None else stack.lanes[number].divisor
            with generator_scope(self.generators[number]) if self.generators else nullcontext():
                outputs = stack.model.alone({**state, **leaves}, batch.inputs, training=True, divisor=divisor)
                loss = self._loss(outputs, batch.targets)
            found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            losses.append(loss.detach())
            with torch.no_grad():
                measured.append(self._measure(outputs, batch.targets))
                gradients = {name: one.unsqueeze(0) for name, one in zip(leaves, found, strict=True) if one is not None}
                self._move(slice(number, number + 1), gradients)
        scores = torch.stack(measured)
        return torch.stack(losses), scores[:, 0], scores[:, 1]

    def _each(self, function: Callable[[Any, Tensor], Any], outputs: Any, targets: Tensor) -> Tensor:
        """What a function gives for each lane, stacked."""
        if function not in self._unmapped:
            try:
                found: Tensor = torch.func.vmap(function, randomness="error")(outputs, targets)
            except (RuntimeError, ValueError, TypeError):
                self._unmapped.append(function)  # it looks at values; called once per lane from now on
            else:
                return found
        return torch.stack([function(lane_of(outputs, lane), own) for lane, own in enumerate(targets.unbind(0))])

    def _measure(self, outputs: Any, targets: Tensor) -> Tensor:
        """Sum and weight of the metric of one lane, float64 (2,), in which counts are exact."""
        if self._metric is None:
            return torch.zeros(2, device=targets.device)
        values = self._metric(tree_map_only(Tensor, Tensor.detach, outputs), targets)
        return torch.stack([torch.as_tensor(value, device=targets.device).to(torch.float64) for value in values])

    def _move(self, rows: Rows, found: dict[str, Tensor]) -> None:
        stack, options = self._stack, self._stack.lanes[0].training
        names = list(found)
        if not names:
            return
        parameters = [stack.parameters[name][rows] for name in names]
        limits = {name: stack.kept[name][rows] for name in names if name in stack.kept}
        if limits:
            found = {name: gradient * limits[name] if name in limits else gradient for name, gradient in found.items()}
        if self.learner is not None:
            self.learner.update(rows, found)
        gradients = [found[name] for name in names]
        gradients = self._pulled(rows, names, parameters, gradients)
        if options.clip is not None:
            scale = (options.clip / (self._norms(gradients) + 1e-6)).clamp(max=1.0)
            gradients = [gradient * _along_lanes(scale, gradient) for gradient in gradients]
        if options.weight_decay:
            gradients = list(foreach_add(gradients, parameters, alpha=options.weight_decay))
        if options.momentum:
            gradients = self._accumulated(rows, names, gradients, options.momentum)
        foreach_add_(parameters, gradients, alpha=-options.lr)
        if isinstance(rows, Tensor):
            for name, parameter in zip(names, parameters, strict=True):
                stack.parameters[name][rows] = parameter
        if self.learner is not None:
            self.learner.follow(rows)

    def _pulled(self, rows: Rows, names: list[str], parameters: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """Add the pull to the start; where steps are plain, by one interpolation of the weights in place."""
        stack, lane = self._stack, self._stack.lanes[0]
        if not lane.pull:
            return gradients
        options = lane.training
        anchors = [stack.anchors[name][rows] for name in names]
        if not (options.momentum or options.weight_decay or options.clip):
            foreach_lerp_(parameters, anchors, options.lr * lane.pull)
            return gradients
        return list(foreach_add(gradients, foreach_sub(parameters, anchors), alpha=lane.pull))

    def _accumulated(self, rows: Rows, names: list[str], gradients: list[Tensor], momentum: float) -> list[Tensor]:
        velocity = [self._stack.velocity[name][rows] for name in names]
        foreach_mul_(velocity, momentum)
        foreach_add_(velocity, gradients)
        if isinstance(rows, Tensor):
            for name, tensor in zip(names, velocity, strict=True):
                self._stack.velocity[name][rows] = tensor
        return velocity

    def _norms(self, gradients: list[Tensor]) -> Tensor:
        """The norm of each lane's whole gradient, float (rows,), which must not depend on the number of rows."""
        lanes = zip(*(gradient.unbind(0) for gradient in gradients), strict=True)
        return torch.stack([torch.linalg.vector_norm(torch.stack(foreach_norm(own))) for own in lanes])


def _along_lanes(values: Tensor, like: Tensor) -> Tensor:
    """View (lanes,) so that it broadcasts against (lanes, …)."""
    viewed: Tensor = values.view(-1, *[1] * (like.ndim - 1))
    return viewed


def _rows(lanes: Sequence[int], device: torch.device) -> Rows:
    """A slice where the lanes lie side by side. Example: (2, 3) gives slice(2, 4), and (0, 2) gives tensor([0, 2])."""
    if lanes[-1] - lanes[0] + 1 == len(lanes):
        return slice(lanes[0], lanes[-1] + 1)
    return torch.tensor(lanes, device=device)
