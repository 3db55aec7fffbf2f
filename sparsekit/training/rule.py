"""Rule: how a learnable mask learns importance and changes its mask. One instance serves one mask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.training.host import Host, split_units


class Rule:
    """The rule of one learnable mask, with what it remembers; the base learns nothing, for a mask that was given and stays."""

    @property
    def settled(self) -> bool:
        """Whether the mask will not change again by itself."""
        return True

    @property
    def explored(self) -> float:
        """Work of exploration so far as a share of the training passes' own work."""
        return 0.0

    def sync(self, host: Host) -> None:
        """Change the mask where it is due."""

    def resample(self, host: Host) -> None:
        """Ask the criterion again and change the mask to what it says."""

    def call(self, host: Host, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the sparse model."""
        return host.model(*args, **kwargs)

    def learn(self, host: Host, gradients: Mapping[Tensor, Tensor] | None, scale: Tensor | None = None) -> None:
        """End a step: learn from the gradients of the weights.

        Args:
            host: The learnable mask.
            gradients: Leaf → gradient; None reads `.grad` of the leaves.
            scale: The factor of a GradScaler that they still have.
        """

    def penalty(self, host: Host) -> Tensor:
        """What the rule adds to the loss: a scalar."""
        return host.scores.new_zeros(())

    def after_step(self, host: Host, optimizer: Optimizer) -> None:
        """After `optimizer` changed parameters of the mask."""

    def state(self) -> dict[str, Tensor]:
        """What it remembers, to be saved."""
        return {}

    def load(self, host: Host, state: dict[str, Tensor]) -> None:
        """Go on from what `state` returned, or from nothing if that is empty."""

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Move or cast every tensor that it remembers."""


class Learning(ABC):
    """The settings of a rule: what `LearnableMask(learning=…)` takes."""

    explore: float

    @abstractmethod
    def rule(self, host: Host) -> Rule:
        """Return a new rule for `host`."""


def check_explore(explore: float) -> None:
    """Raise InvalidValueError unless `explore` is in [0, 1]."""
    if not 0.0 <= explore <= 1.0:
        raise InvalidValueError(f"explore must be in [0, 1], got {explore}; it is a share of extra work, 0.1 is 10 % more")


def refilled(graph: UnitGraph, mask: UnitMask, scores: Tensor, counts: Mapping[str, int]) -> UnitMask:
    """The mask with as many units as `counts` says: the least worth go, or the most worth come; nobody else moves.

    `scores`, float (J,), is what each unit is worth; ties go to the lower index.
    """
    keep = dict(mask)
    for name, score in split_units(graph, scores.cpu()).items():
        rank = torch.where(mask[name], score + (score.max() - score.min() + 1.0), score)
        chosen = rank.argsort(descending=True, stable=True)[: counts[name]]
        keep[name] = torch.zeros_like(mask[name]).index_fill_(0, chosen, True)
    return UnitMask(keep)
