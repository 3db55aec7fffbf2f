"""Removed: the module in place of a removed block."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class Removed(nn.Module):
    """Replaces a removed block: returns the arguments that the block returns if its residual branch is zero.

    Args:
        returned: For each value, the position and the keyword of an argument; None for the value None.
        is_tuple: Whether the values are returned as a tuple.
        is_branch: Whether the first value is zeros in the shape of its argument.
    """

    def __init__(self, returned: Sequence[tuple[int, str] | None], *, is_tuple: bool, is_branch: bool = False) -> None:
        super().__init__()
        self.returned, self.is_tuple, self.is_branch = [*returned], is_tuple, is_branch

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the arguments that the block added its branch to, or zeros for the branch."""
        values: list[Any] = []
        for place in self.returned:
            if place is None:
                values.append(None)
            else:
                position, keyword = place
                values.append(args[position] if 0 <= position < len(args) else kwargs[keyword])
        if self.is_branch:
            values[0] = torch.zeros_like(values[0])
        return tuple(values) if self.is_tuple else values[0]

    def extra_repr(self) -> str:
        """Name the arguments that are returned."""
        names = ["None" if place is None else place[1] or f"argument {place[0]}" for place in self.returned]
        return ", ".join([f"zeros like {names[0]}" if self.is_branch else names[0], *names[1:]])
