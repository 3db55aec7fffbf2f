"""Rows: the lanes that take a step, and how tensors of all lanes are read and written for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from sparsekit.graph.index import along

__all__ = ["Place", "Rows"]

Place: TypeAlias = slice | Tensor
"""Some lanes: a slice, which gives views, or int64 (rows,), which gives copies."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The lanes that take a step.

    Args:
        place: Which lanes are computed.
        active: bool (rows,): whose values move, of the lanes that are computed; None: all of them. What is computed for the
            others is thrown away, so that a step has one shape whoever takes it.
    """

    place: Place
    active: Tensor | None = None

    @property
    def in_place(self) -> bool:
        """Whether `copy` gives views, so that nothing needs to be put back."""
        return self.active is None and isinstance(self.place, slice)

    def copy(self, tensor: Tensor) -> Tensor:
        """What these lanes have, (rows, …), to be written to: a view where `in_place`, otherwise a copy to be put back."""
        return tensor[self.place] if self.active is None else tensor[self.place].clone()

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Write (rows, …) to the lanes whose values move."""
        if self.active is not None:
            values = torch.where(along(self.active, 0, values.ndim), values, tensor[self.place])
        tensor[self.place] = values
