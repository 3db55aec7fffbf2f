"""NormSite: a call of a model that averages over kept units only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class NormSite:
    """A call that averages over an axis of units and, under a mask, over the kept ones only.

    Args:
        module: Qualified name of the innermost module that makes the call.
        call: Which of the averaging calls in one forward pass of that module it is, from 0.
        function: Name of the function, as in `NormCall`.
        dim: The axis of units, counted from the end, so negative.
        size: Positions along it in the dense model.
        places: Group name → (int64 (n,) positions along the axis, int64 (n,) the unit at each).
    """

    module: str
    call: int
    function: str
    dim: int
    size: int
    places: Mapping[str, tuple[Tensor, Tensor]]

    def stays(self, keep: Mapping[str, Tensor]) -> Tensor:
        """Which positions of the axis are kept: bool (size,).

        Args:
            keep: Group name → bool (units,).
        """
        stays = torch.ones(self.size, dtype=torch.bool)
        for name, (positions, units) in self.places.items():
            stays[positions] = keep[name].cpu()[units]
        return stays
