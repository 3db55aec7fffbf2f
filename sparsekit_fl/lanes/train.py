"""LaneTrainer: trains several clients of one shape together, batch after batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sparsekit.graph.graph import UnitGraph
from sparsekit.rng import torch_generator
from sparsekit_fl.lanes.lane import Lane, LaneOutcome
from sparsekit_fl.lanes.model import BoundModel, LaneModel
from sparsekit_fl.lanes.schedule import Turn, turns
from sparsekit_fl.lanes.stack import LaneStack
from sparsekit_fl.lanes.step import LaneStep
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
        batched: Whether one kernel computes all lanes.
    """

    def __init__(
        self, graph: UnitGraph, model: LaneModel, counts: Mapping[str, int], problem: Problem, device: str, *, batched: bool
    ) -> None:
        self._model = model
        self._stack = LaneStack(graph, model, counts, device)
        self._accuracy = problem.metrics.get("accuracy")
        self._step = LaneStep(self._stack, loss=problem.loss, metric=self._accuracy, batched=batched)

    def train(self, lanes: Sequence[Lane[Any]]) -> list[LaneOutcome]:
        """Train clients, each as if it were alone.

        Args:
            lanes: The clients, of equal keys.

        Returns:
            One outcome per client, in order. Their modules hold until the next call.
        """
        # Those with the most batches first: who is left at the end lies side by side, and needs no copy.
        order = sorted(range(len(lanes)), key=lambda place: -_steps(lanes[place]))
        placed = [lanes[place] for place in order]
        # One draw for each, as when a client trains by itself, whether the model draws from it or not.
        generators = [torch_generator(lane.rng) for lane in placed]
        self._step.generators = generators if self._model.draws else ()
        stack = self._stack
        stack.load(placed)
        learning = [lane.learning for lane in placed if lane.learning is not None]
        self._step.learner = learning[0].learner(stack, learning) if learning else None
        log = _Log(scored=self._accuracy is not None)
        for turn in turns([lane.batches for lane in placed]):
            log.add(turn, *self._step(turn.lanes, turn.batches))
        outcomes: list[LaneOutcome | None] = [None] * len(lanes)
        for lane, (place, own) in enumerate(zip(order, log.logs(placed), strict=True)):
            outcomes[place] = self._outcome(lane, own)
        return [outcome for outcome in outcomes if outcome is not None]

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
        self._turns: list[tuple[Turn, Tensor, Tensor, Tensor]] = []

    def add(self, turn: Turn, losses: Tensor, scores: Tensor, weights: Tensor) -> None:
        """Note a step."""
        self._turns.append((turn, losses, scores, weights))

    def logs(self, lanes: Sequence[Lane[Any]]) -> list[TrainingLog]:
        """Add up every lane, epoch by epoch, in the order of its steps."""
        # A sum of losses stays a tensor: in its own precision it has the bits that a client alone has.
        sums: list[list[list[Any]]] = [[[0.0, 0.0, 0.0, 0] for _ in range(lane.batches.epochs)] for lane in lanes]
        steps = [0] * len(lanes)
        for turn, losses, scores, weights in self._turns:
            weighted = (losses * turn.size).cpu()
            for row, (lane, epoch) in enumerate(zip(turn.lanes, turn.epochs, strict=True)):
                own = sums[lane][epoch]
                own[0] = own[0] + weighted[row]
                own[1] += float(scores[row])
                own[2] += float(weights[row])
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


def _steps(lane: Lane[Any]) -> int:
    return lane.batches.epochs * len(lane.batches.bounds)
