"""Lane: how one client trains beside others, as its local policy describes it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask, WeightMask
from sparsekit.graph.state import StateDict
from sparsekit_fl.lanes.rows import Rows
from sparsekit_fl.options.config import TrainingConfig
from sparsekit_fl.training.loop import Batches, TrainingLog

__all__ = ["Lane", "LaneLearner", "LaneLearning", "LaneOutcome", "LaneWeights"]

Result = TypeVar("Result", covariant=True)


class LaneWeights(Protocol):
    """The loaded weights of several clients, as a learner sees them; tables are name → (lanes, …).

    Attributes:
        graph: The units of the dense model.
        device: Where the lanes are.
        repeats: Whether steps are written so that they can be replayed: nothing is read from the device, and every tensor that
            outlives a step is written in place.
        masks: The units that each lane holds at the start, padding included.
        own: Of these, those that the client trains.
        starts: The dense state that each client started from.
        parameters: Narrow, padded.
        buffers: Narrow, padded.
        velocity: Momentum; empty without.
        anchors: What the weights are pulled to; empty where they are not pulled.
    """

    graph: UnitGraph
    device: torch.device
    repeats: bool
    masks: Sequence[UnitMask]
    own: Sequence[UnitMask]
    starts: Sequence[StateDict]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    velocity: dict[str, Tensor]
    anchors: dict[str, Tensor]

    def named(self, own: StateDict) -> dict[str, Tensor]:
        """Return entries under all keys of the model's state, tied ones under each, in its order."""
        ...


class LaneLearner(Protocol):
    """Changes the masks of the lanes while they train."""

    def load(self, lanes: Sequence[LaneLearning]) -> None:
        """Begin again with other clients, whose weights are loaded: tensors are written over in place.

        Args:
            lanes: What each of them learns, in the order of the lanes; of the keys and in the number of those before.
        """
        ...

    def tensors(self) -> list[Tensor]:
        """Return what a step changes, beside the weights and what lies with them."""
        ...

    def update(self, rows: Rows, gradients: Mapping[str, Tensor]) -> None:
        """Learn from the gradients of a step, before the weights move.

        Args:
            rows: The lanes that take the step.
            gradients: Parameter name → (rows, …).
        """
        ...

    def follow(self, rows: Rows) -> None:
        """Give the lanes the masks that they have learned, after the weights moved."""
        ...

    def mask(self, lane: int) -> UnitMask:
        """Return the mask that a lane has now."""
        ...

    def state(self, lane: int) -> dict[str, Tensor]:
        """Return the narrow state of a lane, units in ascending order, and raise InvalidValueError where it has diverged."""
        ...

    def memory(self, lane: int) -> dict[str, Tensor]:
        """Return what a client keeps of what it learned."""
        ...


class LaneLearning(Protocol):
    """What a local policy wants learned beside the weights, for one client."""

    @property
    def key(self) -> Hashable:
        """What must be equal for clients to learn together."""
        ...

    def learner(self, weights: LaneWeights, lanes: Sequence[LaneLearning]) -> LaneLearner:
        """Begin to learn.

        Args:
            weights: Those of the lanes, loaded.
            lanes: What each of them learns, in the order of the lanes; all of equal keys.
        """
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class LaneOutcome:
    """What a client has when its lane is done.

    Args:
        state: Trained, in the shapes that `mask` keeps, units in ascending order, on the CPU.
        mask: The units that it trained last; None for the whole model.
        log: Of the training.
        module: Holds the state, ready to be scored.
        learned: What the learner keeps of the client.
    """

    state: StateDict
    mask: UnitMask | None
    log: TrainingLog
    module: nn.Module
    learned: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, kw_only=True)
class Lane(Generic[Result]):
    """How one client trains beside others: stochastic gradient descent with the options that follow.

    Args:
        start: The dense state to start from.
        mask: The units to train; None for the whole model.
        batches: The epochs.
        training: Learning rate, momentum, weight decay and clipping.
        rng: Seeds what the model draws while training.
        finish: Makes the policy's result of the outcome.
        frozen: Entries that it drops get no gradient.
        pull: Factor of (θ − ω) that is added to the gradient, ω being `start`.
        divided: Names of layers whose outputs are divided by `divisor`.
        divisor: See `divided`.
        learning: What is learned beside the weights.
    """

    start: StateDict
    mask: UnitMask | None
    batches: Batches
    training: TrainingConfig
    rng: np.random.Generator
    finish: Callable[[LaneOutcome], Result]
    frozen: WeightMask | None = None
    pull: float = 0.0
    divided: tuple[str, ...] = ()
    divisor: float = 1.0
    learning: LaneLearning | None = None

    @property
    def key(self) -> Hashable:
        """What must be equal, beside the shapes, for clients to train together."""
        options = self.training  # the learning rate is each lane's own
        steps = (options.momentum, options.weight_decay, options.clip, self.pull)
        return (steps, self.frozen is None, self.divided, None if self.learning is None else self.learning.key)
