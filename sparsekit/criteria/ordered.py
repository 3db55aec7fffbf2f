"""Ordered: the first units stay, so that smaller submodels nest inside larger ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsekit.criteria.base import PatternView
from sparsekit.graph.graph import UnitGroup

__all__ = ["Ordered"]


@dataclass(frozen=True)
class Ordered:
    """Keep a prefix: units 0 to count − 1."""

    def keep(self, group: UnitGroup, count: int, view: PatternView) -> Tensor:  # noqa: ARG002 - the protocol's signature
        """Keep the first `count` units.

        Args:
            group: The units to choose from.
            count: How many to keep, in [1, group.size].
            view: Not looked at.

        Returns:
            bool (units,), exactly `count` of them True.

        Source: Horváth et al., FjORD, NeurIPS 2021; Diao et al., HeteroFL, ICLR 2021.
        """
        return torch.arange(group.size) < count
