"""Rolling: a window of units that advances by a step each round stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsekit.criteria import View
from sparsekit.errors import InvalidValueError, MissingImportanceError
from sparsekit.graph import UnitGraph


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

    def scores(self, graph: UnitGraph, view: View) -> Mapping[str, Tensor]:
        """Score each unit by minus its distance from the start of this round's window.

        Args:
            graph: The groups.
            view: A `RoundView`; its `round` places the window.

        Returns:
            Group name → float64 (units,), no two equal.

        Raises:
            MissingImportanceError: the view has no round.

        Source: Alam et al., FedRolex, NeurIPS 2022.
        """
        round = getattr(view, "round", None)
        if round is None:
            raise MissingImportanceError("Rolling needs the round; pass RoundView(round=1)")
        return {
            name: -((torch.arange(group.size, dtype=torch.float64) - round * self.step) % group.size)
            for name, group in graph.groups.items()
        }
