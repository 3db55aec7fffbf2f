"""Trial, draw_mask(): the masks under which the verification compares a gated and a narrow model."""

import math
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from sparsekit.graph.graph import UnitGraph


class Trial(NamedTuple):
    """A mask to compare under, for every group.

    Args:
        order: Number of the random order of the units, of which the first are kept.
        share: Share of the units kept, at least one; 0 for the least width.
        rest: Keep the other units instead, so that with both masks each unit is kept once and dropped once.
        training: Compare in train mode, where the model accepts it.
        twice: Cut in two steps, as a schedule does: the narrow model is cut from one that has lost half of the units to go.
        positive: Draw biases of order one above zero, so that few units are silent after a ReLU, where errors do not show.
        bit: Keep the units in whose number this bit is not set instead.
        mixed: Give the narrow model its units in another order, in every tensor alike, so that each unit must have its own
            positions. Kept sets alone do not tell two kept units apart.
    """

    order: int
    share: float
    rest: bool = False
    training: bool = False
    twice: bool = False
    positive: bool = False
    bit: int | None = None
    mixed: bool = True

    @property
    def is_least(self) -> bool:
        """Whether groups keep one unit only, of which some statistics are not defined."""
        return self.share == 0

    @property
    def moves_alone(self) -> bool:
        """Whether units change places and none is dropped."""
        return self.mixed and self.share == 1


HALF = Trial(0, 0.5)
LEAST = Trial(0, 0.0, twice=True, positive=True)
MOVED = Trial(0, 1.0, positive=True)
"""Nothing is dropped: every unit has the place of the next, in every tensor alike.

A wrong order that passes is itself a rotation, in which no unit has its own positions: the least width finds it.
"""
FEW = (HALF, LEAST, HALF._replace(rest=True, training=True), MOVED)
"""For larger models."""
MANY = (*FEW, Trial(1, 0.3, training=True), Trial(1, 0.3, rest=True), Trial(2, 0.0))


class Masks:
    """Draws the masks of trials; those of one order and of one group go together."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._orders: dict[tuple[int, str], Tensor] = {}

    def draw(self, graph: UnitGraph, names: Collection[str], trial: Trial) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Group name → bool (units,) after the first step of a cut in two, and after the second. Other groups stay whole."""
        first: dict[str, Tensor] = {}
        keep: dict[str, Tensor] = {}
        for name, group in graph.groups.items():
            dropped = self._dropped(name, group.size, trial) if name in names else torch.zeros(0, dtype=torch.int64)
            dropped = dropped[: group.size - group.least]
            first[name], keep[name] = (torch.ones(group.size, dtype=torch.bool) for _ in range(2))
            first[name][dropped[: len(dropped) // 2]] = False
            keep[name][dropped] = False
        return first, keep

    def _dropped(self, name: str, size: int, trial: Trial) -> Tensor:
        if trial.bit is not None:
            return torch.nonzero((torch.arange(size) >> trial.bit) % 2).flatten()
        key = (trial.order, name)
        if key not in self._orders or len(self._orders[key]) != size:
            self._orders[key] = torch.randperm(size, generator=self._generator)
        count = max(1, math.ceil(trial.share * size))
        if trial.share == HALF.share and size in (4, 5):
            count = size - 1  # two kept units may have each other's positions in whichever order they are
        return self._orders[key][:count] if trial.rest and count < size else self._orders[key][count:]
