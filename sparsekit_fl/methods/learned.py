"""What FedLPS adds to the gradients of a step: importance learns from them, and weights are pulled to the received state."""

from __future__ import annotations

from torch import Tensor

from sparsekit.graph import StateDict
from sparsekit.training import LearnableMask
from sparsekit_fl.client.fit import Adjust
from sparsekit_fl.config import TrainingConfig
from sparsekit_fl.methods.client import Leaves, pull_towards


class PullToReceived:
    """`pull_towards` the received state, loaded into a mask that changes: the anchors of kept units are gathered again."""

    def __init__(
        self, masked: LearnableMask, leaves: Leaves, received: StateDict, strength: float, training: TrainingConfig
    ) -> None:
        self._narrow, self._leaves, self._received = masked.narrow_model, leaves, received
        self._strength, self._training = strength, training
        self._gather()

    def _gather(self) -> None:
        self._version = self._narrow.version
        anchors = self._narrow.gather(self._received, self._leaves)
        self._pull = pull_towards(self._leaves, anchors, self._strength, training=self._training)

    def __call__(self, gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        if self._version != self._narrow.version:
            self._gather()
        return self._pull(gradients)


def learning(masked: LearnableMask) -> Adjust:
    """Step importance by the gradients of the weights, before they are clipped."""

    def adjust(gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        masked.update_importance(gradients)
        return gradients

    return adjust
