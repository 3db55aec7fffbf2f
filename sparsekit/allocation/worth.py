"""What the units of a group lose together when its worst ones go, so that groups can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph

__all__ = ["Scale", "block_losses", "check_scale", "ranked_worth"]

Scale = Literal["rest", "mean", "none"]
"""How scores of different groups are made comparable.

"rest" takes the share of what is left of the group when the unit goes (as LAMP does for weights), once for each layer that
makes the units; "mean" divides by the mean of the group; "none" compares scores as they are.
"""

_HUGE = 1e30


def check_scale(scale: object) -> None:
    """Raise unless `scale` is one of the names.

    Raises:
        InvalidValueError: it is not.
    """
    if scale not in get_args(Scale):
        raise InvalidValueError(f"scale must be one of {', '.join(get_args(Scale))}, got {scale!r}")


def ranked_worth(graph: UnitGraph, scores: Mapping[str, Tensor], scale: Scale) -> dict[str, npt.NDArray[np.float64]]:
    """The units' worth from the best of each group to its worst, at least 0 and comparable between groups.

    Args:
        graph: The groups.
        scores: Group name → float (units,); larger stays.
        scale: What makes groups comparable.

    Returns:
        Group name → float64 (units,), from the unit that goes last to the first: scores 3, 1 and 2 on scale "mean" give
        1.5, 1 and 0.5.

    Raises:
        InvalidValueError: scores are missing or NaN.

    Source: Lee et al., Layer-adaptive sparsity for the magnitude-based pruning, ICLR 2021 (arXiv 2010.07611), for "rest",
    there for single weights.
    """
    check_scale(scale)
    ranked: dict[str, npt.NDArray[np.float64]] = {}
    for name, group in graph.groups.items():
        found = scores.get(name)
        if found is None or found.shape != (group.size,):
            raise InvalidValueError(f"scores of group {name!r} must have shape ({group.size},), got {found!r}")
        values = found.detach().cpu().double().numpy()
        if np.isnan(values).any():
            raise InvalidValueError(
                f"scores of group {name!r} hold NaN, for unit {int(np.isnan(values).argmax())} first;"
                " look for NaN in the weights or the data that they were computed from"
            )
        ranked[name] = np.clip(np.sort(values)[::-1], -_HUGE, _HUGE)
    lowest = min((float(values[-1]) for values in ranked.values()), default=0.0)
    for name, values in ranked.items():
        if scale == "none":
            ranked[name] = values - min(lowest, 0.0)
            continue
        positive = values - min(float(values[-1]), 0.0)
        largest = float(positive[0])
        positive = positive / largest if largest > 0 else np.ones_like(positive)
        if scale == "mean":
            ranked[name] = positive / positive.mean()
        else:
            ranked[name] = _makers(graph, name) * positive**2 / np.cumsum(positive**2)
    return ranked


def _makers(graph: UnitGraph, group: str) -> int:
    """Number of layers that make the units: a residual stream of four blocks narrows all four when it narrows."""
    made = {piece.name for piece in graph.groups[group].slices if piece.side == "out" and len(graph.shapes[piece.name]) > 1}
    return max(1, len(made))


def block_losses(worth: Mapping[str, npt.NDArray[np.float64]], groups: Sequence[str], counts: Sequence[int]) -> list[float]:
    """What is lost at each step down a list of counts.

    Args:
        worth: As from `ranked_worth`.
        groups: Those that go down together.
        counts: Numbers of units, ascending.

    Returns:
        As many numbers as counts: at place i what goes from `counts[i]` to `counts[i - 1]` units; 0 at place 0.
    """
    losses = [0.0]
    for fewer, more in pairwise(counts):
        losses.append(float(sum(worth[name][fewer:more].sum() for name in groups)))
    return losses
