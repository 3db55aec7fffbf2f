"""LaneStep: one step of stochastic gradient descent of several clients."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsekit._torch import (
    foreach_add,
    foreach_add_,
    foreach_mul_,
    foreach_norm,
    foreach_sub,
    tree_map_only,
)
from sparsekit.graph.index import along
from sparsekit_fl.lanes.arrange import lane_of
from sparsekit_fl.lanes.lane import LaneLearner
from sparsekit_fl.lanes.recorder import Outputs, Recorder
from sparsekit_fl.lanes.replay import Replay
from sparsekit_fl.lanes.rows import Rows
from sparsekit_fl.lanes.stack import LaneStack
from sparsekit_fl.lanes.turn import FixedTurn
from sparsekit_fl.training.loop import Batch

__all__ = ["LaneStep", "StepResult"]

_KINDS = 32  # of turns whose buffers are kept


class StepResult(NamedTuple):
    """What is noted of a step: float (rows,) each, and the row of each lane that took it."""

    losses: Tensor
    scores: Tensor
    weights: Tensor
    rows: Sequence[int]


class LaneStep:
    """One step of several clients; the same numbers as a step of each by itself.

    Args:
        stack: Loaded.
        loss: (outputs, targets) → scalar.
        metric: (outputs, targets) → (sum, weight); None measures nothing.
        recorder: Records steps; None starts every kernel by itself.
    """

    def __init__(
        self,
        stack: LaneStack,
        *,
        loss: Callable[[Any, Tensor], Tensor],
        metric: Callable[[Any, Tensor], tuple[Any, Any]] | None,
        recorder: Recorder | None = None,
    ) -> None:
        self._stack = stack
        self._loss = loss
        self._metric = metric
        self._trained = [name for name, trains in stack.model.parameters.items() if trains]
        self._maps: dict[Any, bool] = {}
        self.learner: LaneLearner | None = None
        self._replay = Replay(recorder, self._changed)
        self._turns: OrderedDict[Any, FixedTurn] = OrderedDict()
        self._version = stack.version

    def __call__(self, lanes: Sequence[int], batches: Sequence[Batch]) -> StepResult:
        """Take a step.

        Args:
            lanes: Who takes it, ascending.
            batches: The batch of each, all of one size.

        Returns:
            The loss of each lane, and sum and weight of the metric.
        """
        if self._stack.repeats:
            return self._repeated(lanes, batches)
        inputs = tuple(torch.stack(each) for each in zip(*(batch.inputs for batch in batches), strict=True))
        found = self._step(_rows(lanes, self._stack.device), inputs, torch.stack([batch.targets for batch in batches]))
        return StepResult(found[0], found[1], found[2], range(len(lanes)))

    def _repeated(self, lanes: Sequence[int], batches: Sequence[Batch]) -> StepResult:
        """The same on buffers that stay where they are, so that steps of one kind can be replayed."""
        stack = self._stack
        if self._version != stack.version:
            self._version = stack.version
            self._replay.forget()
            self._turns.clear()
        kind = FixedTurn.kind(lanes, batches[0], len(stack.lanes))
        if kind not in self._turns:
            self._turns[kind] = FixedTurn(lanes, batches[0], len(stack.lanes), stack.device)
            while len(self._turns) > _KINDS:
                self._replay.forget()  # a recording reads the buffers of its turn
                self._turns.popitem(last=False)
        self._turns.move_to_end(kind)
        turn = self._turns[kind]
        turn.fill(lanes, batches)
        found = self._replay(kind, lambda: self._step(turn.rows, turn.inputs, turn.targets))
        return StepResult(found[0], found[1], found[2], turn.places(lanes))

    def _changed(self) -> list[Tensor]:
        return [*self._stack.tensors(), *(() if self.learner is None else self.learner.tensors())]

    def _step(self, rows: Rows, inputs: tuple[Tensor, ...], targets: Tensor) -> Outputs:
        """A step of rows by one kernel for all: losses, sums and weights of the metric, (rows,) each."""
        stack = self._stack
        buffers = {name: rows.copy(tensor) for name, tensor in stack.buffers.items()}
        losses, measured, gradients = self._together(rows, buffers, inputs, targets)
        with torch.no_grad():
            if not rows.in_place:
                for name, tensor in buffers.items():
                    rows.put(stack.buffers[name], tensor)
            # After the buffers, which move to other units where the masks change.
            self._move(rows, gradients, stack.rates[rows.place])
        return losses, measured[:, 0], measured[:, 1]

    def _together(
        self, rows: Rows, buffers: dict[str, Tensor], inputs: tuple[Tensor, ...], targets: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Losses, metric and gradients by one kernel for all lanes."""
        stack, place = self._stack, rows.place
        leaves = {name: stack.parameters[name][place].detach().requires_grad_() for name in self._trained}
        fixed = {name: tensor[place] for name, tensor in stack.parameters.items() if name not in leaves}
        divisors = None if stack.divisors is None else stack.divisors[place]
        outputs = stack.model({**leaves, **fixed, **buffers}, inputs, divisors)
        losses = self._each(self._loss, outputs, targets)
        found = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
        with torch.no_grad():
            measured = self._each(self._measure, outputs, targets)
        return losses.detach(), measured, {name: g for name, g in zip(leaves, found, strict=True) if g is not None}

    def _each(self, function: Callable[[Any, Tensor], Any], outputs: Any, targets: Tensor) -> Tensor:
        """What a function gives for each lane, stacked."""
        mapped: Callable[..., Tensor] = torch.func.vmap(function, randomness="error")
        if function not in self._maps:  # tried once: an error while a step is recorded is that of the recording
            try:
                found = mapped(outputs, targets)
            except (RuntimeError, ValueError, TypeError):
                self._maps[function] = False  # it looks at values; called once per lane from now on
            else:
                self._maps[function] = True
                return found
        if self._maps[function]:
            return mapped(outputs, targets)
        return torch.stack([function(lane_of(outputs, lane), own) for lane, own in enumerate(targets.unbind(0))])

    def _measure(self, outputs: Any, targets: Tensor) -> Tensor:
        """Sum and weight of the metric of one lane, float64 (2,), in which counts are exact."""
        if self._metric is None:
            return torch.zeros(2, device=targets.device)
        values = self._metric(tree_map_only(Tensor, Tensor.detach, outputs), targets)
        # A number is filled in, since copying it there would wait for the device.
        return torch.stack(
            [
                value.to(targets.device, torch.float64)
                if isinstance(value, Tensor)
                else torch.full((), float(value), dtype=torch.float64, device=targets.device)
                for value in values
            ]
        )

    def _move(self, rows: Rows, found: dict[str, Tensor], lr: Tensor) -> None:
        """Move the weights of rows against their gradients, by a learning rate for each, float (rows,)."""
        stack, options, place = self._stack, self._stack.lanes[0].training, rows.place
        names = list(found)
        if not names:
            return
        parameters = [rows.copy(stack.parameters[name]) for name in names]
        limits = {name: stack.kept[name][place] for name in names if name in stack.kept}
        if limits:
            found = {name: gradient * limits[name] if name in limits else gradient for name, gradient in found.items()}
        if self.learner is not None:
            self.learner.update(rows, found)
        gradients = [found[name] for name in names]
        gradients = self._pulled(rows, names, parameters, gradients, lr)
        if options.clip is not None:
            scale = (options.clip / (self._norms(gradients) + 1e-6)).clamp(max=1.0)
            gradients = [gradient * _along_lanes(scale, gradient) for gradient in gradients]
        if options.weight_decay:
            gradients = list(foreach_add(gradients, parameters, alpha=options.weight_decay))
        if options.momentum:
            gradients = self._accumulated(rows, names, gradients, options.momentum)
        foreach_add_(parameters, [gradient * _along_lanes(lr, gradient) for gradient in gradients], alpha=-1.0)
        if not rows.in_place:
            for name, parameter in zip(names, parameters, strict=True):
                rows.put(stack.parameters[name], parameter)
        if self.learner is not None:
            self.learner.follow(rows)

    def _pulled(
        self, rows: Rows, names: list[str], parameters: list[Tensor], gradients: list[Tensor], lr: Tensor
    ) -> list[Tensor]:
        """Add the pull to the start; where steps are plain, by one interpolation of the weights in place."""
        stack, lane = self._stack, self._stack.lanes[0]
        if not lane.pull:
            return gradients
        options = lane.training
        anchors = [stack.anchors[name][rows.place] for name in names]
        if options.momentum or options.weight_decay or options.clip:
            return list(foreach_add(gradients, foreach_sub(parameters, anchors), alpha=lane.pull))
        for parameter, anchor in zip(parameters, anchors, strict=True):
            parameter.lerp_(anchor, _along_lanes(lr * lane.pull, parameter))
        return gradients

    def _accumulated(self, rows: Rows, names: list[str], gradients: list[Tensor], momentum: float) -> list[Tensor]:
        velocity = [rows.copy(self._stack.velocity[name]) for name in names]
        foreach_mul_(velocity, momentum)
        foreach_add_(velocity, gradients)
        if not rows.in_place:
            for name, tensor in zip(names, velocity, strict=True):
                rows.put(self._stack.velocity[name], tensor)
        return velocity

    def _norms(self, gradients: list[Tensor]) -> Tensor:
        """The norm of each lane's whole gradient, float (rows,), which must not depend on the number of rows."""
        lanes = zip(*(gradient.unbind(0) for gradient in gradients), strict=True)
        return torch.stack([torch.linalg.vector_norm(torch.stack(foreach_norm(own))) for own in lanes])


def _along_lanes(values: Tensor, like: Tensor) -> Tensor:
    """View (lanes,) so that it broadcasts against (lanes, …), in its type."""
    return along(values.to(like.dtype), 0, like.ndim)


def _rows(lanes: Sequence[int], device: torch.device) -> Rows:
    """A slice where the lanes lie side by side. Example: (2, 3) gives slice(2, 4), and (0, 2) gives tensor([0, 2])."""
    if lanes[-1] - lanes[0] + 1 == len(lanes):
        return Rows(slice(lanes[0], lanes[-1] + 1))
    return Rows(torch.tensor(lanes, device=device))
