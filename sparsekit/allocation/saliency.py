"""Importance of the units of a group, ranked and made comparable between groups."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsekit.criteria.base import check_scores, refuse_nan
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph

Scale = Literal["relative", "mean", "none"]
"""How scores of different groups are made comparable.

"relative" divides by the rest of the group when the unit goes (as LAMP does for weights), once for each layer that
makes the units; "mean" divides by the mean of the group; "none" compares scores as they are.
"""

_HUGE = 1e30


def ranked_saliency(graph: UnitGraph, scores: Mapping[str, Tensor], scale: Scale) -> dict[str, npt.NDArray[np.float64]]:
    """Return the importance of the units of each group, sorted from best to worst, at least 0 and comparable between groups.

    Returns:
        Group name → float64 (units,): scores 3, 1 and 2 on scale "mean" give 1.5, 1 and 0.5.

    Raises:
        InvalidValueError: scores are missing or NaN, or another scale.

    Source: Lee et al., Layer-adaptive sparsity for the magnitude-based pruning, ICLR 2021 (arXiv 2010.07611), for "relative",
        there for single weights.
    """
    if scale not in get_args(Scale):
        raise InvalidValueError(f"scale must be one of {', '.join(get_args(Scale))}, got {scale!r}")
    check_scores(graph, scores, "scores")
    given = {name: scores[name].detach().cpu().double().clamp(-_HUGE, _HUGE) for name in graph.groups}
    for name, values in given.items():
        refuse_nan(values, f"scores of group {name!r}")
    lowest = min((float(values.min().clamp_max(0.0)) for values in given.values()), default=0.0)
    saliency = {}
    for name, values in given.items():
        if scale == "none":
            values = values - lowest
        elif scale == "mean":
            values = values - values.min().clamp_max(0.0)
            values = values / values.mean() if values.max() > 0 else torch.ones_like(values)
        else:
            values = _makers(graph, name) * share_of_remaining(values)
        saliency[name] = np.sort(values.numpy())[::-1]
    return saliency


def share_of_remaining(scores: Tensor) -> Tensor:
    """Return s² of each unit divided by Σ s² over the units not removed before it, if the worst go first: float64 (units,).

    Scores of 3, 1 and 2 give 1, 1/14 and 4/13. Of equal units, the higher index goes first. If scores are negative, the least
    of them counts as 0; if all are 0, the units are equal.
    """
    values = scores.detach().double()
    order = torch.sort(values, descending=True, stable=True).indices
    ranked = values[order]
    ranked = ranked - ranked[-1].clamp_max(0.0)
    ranked = ranked / ranked[0] if ranked[0] > 0 else torch.ones_like(ranked)
    return torch.empty_like(values).index_copy_(0, order, ranked.square() / ranked.square().cumsum(0))


def _makers(graph: UnitGraph, group: str) -> int:
    """Return the number of layers that make the units: a residual stream of four blocks narrows all four."""
    made = {piece.name for piece in graph.groups[group].slices if piece.side == "out" and len(graph.shapes[piece.name]) > 1}
    return max(1, len(made))


def block_losses(saliency: Mapping[str, npt.NDArray[np.float64]], groups: Sequence[str], counts: Sequence[int]) -> list[float]:
    """Return the loss of each step down ascending counts: entry i from `counts[i]` to `counts[i - 1]`; entry 0 is 0."""
    losses = [0.0]
    for fewer, more in pairwise(counts):
        losses.append(float(sum(saliency[name][fewer:more].sum() for name in groups)))
    return losses
