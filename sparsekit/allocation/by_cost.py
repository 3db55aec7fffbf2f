"""by_cost(), by_loss() and global_ranking(): remove the least important units first, per cost or overall."""

import math
from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsekit.allocation.limits import Counts
from sparsekit.allocation.problem import Problem
from sparsekit.criteria.base import check_scores, refuse_nan
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph

Scale = Literal["relative", "none"]
"""How scores of different groups are made comparable.

"relative" divides by the rest of the group when the unit goes (as LAMP does for weights), once for each layer that
makes the units; "none" compares scores as they are.
"""

_HUGE = 1e30


def by_cost(problem: Problem, *, scale: Scale = "relative", width_penalty: float = 1.0) -> Counts:
    """Remove the unit with the lowest importance per saved cost, again and again, until the budget is met.

    The saving of a unit is exact and taken at the present widths: the fewer channels a layer has, the less one more input
    channel costs. In the end, units that still fit are put back. With several limits, the saving is the sum over the limits
    that are still exceeded, each as a share of its limit.

    Args:
        problem: Groups, scores, costs and budget.
        scale: How scores of different groups are made comparable, see `Scale`; "none" if they are already.
        width_penalty: Power of (size of the group / units that stay) that raises the importance of a unit if few stay. With
            0, a group may keep three units of 32, since each alone mattered little while the others were there. Use 2 if the
            network trains further.

    Raises:
        InvalidValueError: no budget, or a scale or width_penalty that is not allowed.

    Source: Liu et al., Group Fisher pruning, ICML 2021 (arXiv 2108.00708), for scores by cost.
    """
    problem.require_budget("by_cost")
    if not 0.0 <= width_penalty < math.inf:
        raise InvalidValueError(f"width_penalty must be a finite number >= 0, got {width_penalty}; 0 takes scores as they are")
    saliency = _ranked_saliency(problem.graph, problem.scores, scale)
    saliency = {name: own * (own.size / np.arange(1, own.size + 1)) ** width_penalty for name, own in saliency.items()}
    return problem.walk(saliency, by_cost=True)


def by_loss(problem: Problem) -> Counts:
    """Remove units as `by_cost` does, for scores that estimate the loss without a unit, which need no scaling.

    Whole layers may lose most of their units if the loss hardly depends on them. Use it with `Fisher(per_position=True)`.
    """
    return by_cost(problem, scale="none")


def global_ranking(problem: Problem, *, scale: Scale = "relative") -> Counts:
    """Remove the least important units of the whole model until the budget is met; then put back units that still fit.

    Arguments and errors are as in `by_cost`.
    """
    problem.require_budget("global")
    saliency = _ranked_saliency(problem.graph, problem.scores, scale)
    return problem.walk(saliency, by_cost=False)


def _ranked_saliency(graph: UnitGraph, scores: Mapping[str, Tensor], scale: Scale) -> dict[str, npt.NDArray[np.float64]]:
    """Return the importance of the units from the best of each group to its worst, at least 0 and comparable between groups.

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
        values = values - lowest if scale == "none" else _makers(graph, name) * share_of_remaining(values)
        saliency[name] = np.sort(values.numpy())[::-1]
    return saliency


def share_of_remaining(scores: Tensor) -> Tensor:
    """Return s² / Σ s² over the units that are left of the group when the unit goes, the worst first; float64 (units,).

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
