"""What one lane has of a structure of tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparsekit._torch import tree_map_only

__all__ = ["lane_of"]


def lane_of(tree: Any, lane: int) -> Any:
    """Return what one lane has of every tensor in a structure of tuples, lists and dicts."""
    return tree_map_only(Tensor, lambda tensor: tensor[lane], tree)
