"""Rolling: a window of units that advances by a step each round stays."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsekit.criteria.base import PatternView
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGroup

__all__ = ["Rolling"]


@dataclass(frozen=True)
class Rolling:
    """Keep the window {round·step, …, round·step + count − 1} modulo the group's size.

    Args:
        step: Units by which the window moves each round, at least 1.
    """

    step: int = 1

    def __post_init__(self) -> None:
        if self.step < 1:
            raise InvalidValueError(f"step must be at least 1, got {self.step}")

    def keep(self, group: UnitGroup, count: int, view: PatternView) -> Tensor:
        """Keep the window of this round.

        Args:
            group: The units to choose from.
            count: How many to keep, in [1, group.size].
            view: Its `round` places the window.

        Returns:
            bool (units,), exactly `count` of them True.

        Source: Alam et al., FedRolex, NeurIPS 2022.
        """
        keep = torch.zeros(group.size, dtype=torch.bool)
        keep[(view.round * self.step + torch.arange(count)) % group.size] = True
        return keep
