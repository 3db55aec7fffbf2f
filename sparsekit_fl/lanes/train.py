"""LaneTrainer: trains several clients of one shape together, batch after batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsekit.graph.graph import UnitGraph
from sparsekit.rng import torch_generator
from sparsekit_fl.lanes.alone import train_alone
from sparsekit_fl.lanes.lane import Lane, LaneLearner, LaneOutcome
from sparsekit_fl.lanes.model import BoundModel, LaneModel
from sparsekit_fl.lanes.queues import Queue
from sparsekit_fl.lanes.recorder import RECORDERS, Recorder
from sparsekit_fl.lanes.schedule import Turn, turns
from sparsekit_fl.lanes.stack import LaneStack
from sparsekit_fl.lanes.step import LaneStep, StepResult
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.training.loop import TrainingLog

__all__ = ["LaneTrainer"]


class LaneTrainer:
    """Trains clients whose padded models have one shape.

    Args:
        graph: The units of the dense model.
        model: The module of the lanes.
        counts: Group name → number of units that each lane holds, padding included.
        problem: Loss and metrics.
        device: Where the lanes train.
        batched: Whether one kernel computes all lanes; otherwise they train one after the other.
        recorder: Records steps; None starts every kernel by itself.
        queue: Where the kernels run.
    """

    def __init__(
        self,
        graph: UnitGraph,
        model: LaneModel,
        counts: Mapping[str, int],
        problem: Problem,
        device: str,
        *,
        batched: bool,
        recorder: Recorder | None = None,
        queue: Queue | None = None,
    ) -> None:
        self._model = model
        # The form of the steps does not depend on whether they are recorded, and so neither do their bits.
        repeats = batched and torch.device(device).type in RECORDERS
        self._stack = LaneStack(graph, model, counts, device, repeats=repeats)
        self._accuracy = problem.metrics.get("accuracy")
        self._step = LaneStep(self._stack, loss=problem.loss, metric=self._accuracy, recorder=recorder)
        self._problem, self._batched = problem, batched
        self._queue = queue or Queue()
        self._learned = -1  # the version of the stack that the learner knows

    def train(self, lanes: Sequence[Lane[Any]]) -> Callable[[], list[LaneOutcome]]:
        """Start to train clients, each as if it were alone.

        Args:
            lanes: The clients, of equal keys.

        Returns:
            A function that waits for the device and returns one outcome per client, in order; call it before the next training
            starts. The outcomes' modules hold until then too.
        """
        with self._queue.entered():
            return self._train(lanes)

    def _train(self, lanes: Sequence[Lane[Any]]) -> Callable[[], list[LaneOutcome]]:
        # Those with the most batches first: who is left at the end lies side by side, and needs no copy.
        order = sorted(range(len(lanes)), key=lambda place: -_steps(lanes[place]))
        placed = [lanes[place] for place in order]
        stack = self._stack
        stack.load(placed)
        if not self._batched:
            logs = [train_alone(stack, lane, self._problem) for lane in range(len(placed))]
            outcomes = {place: self._outcome(lane, logs[lane]) for lane, place in enumerate(order)}
            return lambda: [outcomes[place] for place in range(len(lanes))]
        for lane in placed:
            torch_generator(lane.rng)  # one draw, as when a client trains by itself; the model draws nothing
        self._step.learner = self._learner(placed)
        log = _Log(scored=self._accuracy is not None)
        for turn in turns([lane.batches for lane in placed]):
            log.add(turn, self._step(turn.lanes, turn.batches))

        def finish() -> list[LaneOutcome]:
            with self._queue.entered():
                logs = log.logs(placed)
                found = {place: self._outcome(lane, logs[lane]) for lane, place in enumerate(order)}
            self._queue.join()
            return [found[place] for place in range(len(lanes))]

        return finish

    def _learner(self, lanes: Sequence[Lane[Any]]) -> LaneLearner | None:
        """What learns beside the weights: that of the training before where recordings know its tensors."""
        learning = [lane.learning for lane in lanes if lane.learning is not None]
        if not learning:
            return None
        stack, before = self._stack, self._step.learner
        if before is not None and stack.repeats and self._learned == stack.version:
            before.load(learning)
            return before
        self._learned = stack.version
        return learning[0].learner(stack, learning)

    def _outcome(self, lane: int, log: TrainingLog) -> LaneOutcome:
        stack, learner = self._stack, self._step.learner
        own = {name: stack.of(name)[lane] for name in (*self._model.parameters, *self._model.buffers)}
        mask = stack.lanes[lane].mask if learner is None else learner.mask(lane)
        module = BoundModel(self._model, own, mask)
        if learner is None:
            return LaneOutcome(state=stack.read(lane), mask=mask, log=log, module=module)
        return LaneOutcome(state=learner.state(lane), mask=mask, log=log, module=module, learned=learner.memory(lane))


class _Log:
    """Losses and scores of every step, read once at the end: reading a number waits for the device."""

    def __init__(self, *, scored: bool) -> None:
        self._scored = scored
        self._turns: list[tuple[Turn, StepResult]] = []

    def add(self, turn: Turn, result: StepResult) -> None:
        """Note a step."""
        self._turns.append((turn, result))

    def logs(self, lanes: Sequence[Lane[Any]]) -> list[TrainingLog]:
        """Add up every lane, epoch by epoch, in the order of its steps."""
        # A sum of losses stays a tensor: in its own precision it has the bits that a client alone has.
        sums: list[list[list[Any]]] = [[[0.0, 0.0, 0.0, 0] for _ in range(lane.batches.epochs)] for lane in lanes]
        steps = [0] * len(lanes)
        results = [result for _, result in self._turns]
        losses = _on_host([result.losses * turn.size for turn, result in self._turns])
        scores, weights = _on_host([result.scores for result in results]), _on_host([result.weights for result in results])
        for number, (turn, result) in enumerate(self._turns):
            score, weight = scores[number].tolist(), weights[number].tolist()
            for row, lane, epoch in zip(result.rows, turn.lanes, turn.epochs, strict=True):
                own = sums[lane][epoch]
                own[0] = own[0] + losses[number][row]
                own[1] += score[row]
                own[2] += weight[row]
                own[3] += turn.size
                steps[lane] += 1
        return [
            TrainingLog(
                loss=tuple(float(loss) / seen for loss, _, _, seen in own),
                accuracy=tuple(score / max(weight, 1e-12) for _, score, weight, _ in own) if self._scored else (),
                examples=sum(seen for _, _, _, seen in own),
                padded_examples=lane.batches.padded_examples * len(own),
                batches=taken,
            )
            for lane, own, taken in zip(lanes, sums, steps, strict=True)
        ]


def _on_host(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same on the CPU, by one copy."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return tensors
    found: Sequence[Tensor] = torch.cat(list(tensors)).cpu().split([len(tensor) for tensor in tensors])
    return found


def _steps(lane: Lane[Any]) -> int:
    return lane.batches.epochs * len(lane.batches.bounds)
