"""Ordered: the first units are worth most, so that smaller submodels nest inside larger ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsekit.criteria.base import View
from sparsekit.graph.graph import UnitGraph


@dataclass(frozen=True)
class Ordered:
    """Keep a prefix of each group: units 0 to count − 1.

    Source: Horváth et al., FjORD, NeurIPS 2021; Diao et al., HeteroFL, ICLR 2021.
    """

    def scores(self, graph: UnitGraph, view: View) -> Mapping[str, Tensor]:  # noqa: ARG002 - the protocol's signature
        """Score each unit by minus its index."""
        return {name: -torch.arange(group.size, dtype=torch.float64) for name, group in graph.groups.items()}
