"""by_cost(), by_loss() and global_ranking(): remove the least important units first, per cost or overall."""

import math
from functools import partial

import numpy as np

from sparsekit.allocation.limits import Counts
from sparsekit.allocation.problem import Problem
from sparsekit.allocation.saliency import Scale, block_losses, ranked_saliency
from sparsekit.errors import InvalidValueError


def by_cost(problem: Problem, *, scale: Scale = "relative", width_penalty: float = 1.0) -> Counts:
    """Remove the unit with the lowest importance per saved cost, again and again, until the budget is met.

    The saving of a unit is exact and taken at the present widths: the fewer channels a layer has, the less one more input
    channel costs. In the end, units that still fit are put back. With several limits, the saving is the sum over the limits
    that are still exceeded, each as a share of its limit.

    Args:
        problem: Groups, scores, costs and budget.
        scale: How scores of different groups are made comparable, as in `ranked_saliency`; "none" if they are already.
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
    saliency = ranked_saliency(problem.graph, problem.scores, scale)
    saliency = {name: own * (own.size / np.arange(1, own.size + 1)) ** width_penalty for name, own in saliency.items()}
    return problem.walk(partial(block_losses, saliency), by_cost=True)


def by_loss(problem: Problem) -> Counts:
    """Remove units as `by_cost` does, for scores that estimate the loss without a unit, which need no scaling.

    Whole layers may lose most of their units if the loss hardly depends on them. Use it with `Fisher(per_position=True)`.

    Raises:
        InvalidValueError: no budget.
    """
    return by_cost(problem, scale="none")


def global_ranking(problem: Problem, *, scale: Scale = "relative") -> Counts:
    """Remove the least important units of the whole model until the budget is met; then put back units that still fit.

    Args:
        problem: Groups, scores, costs and budget.
        scale: How scores of different groups are made comparable, as in `ranked_saliency`; "none" if they are already.

    Raises:
        InvalidValueError: no budget, or a scale that is not allowed.
    """
    problem.require_budget("global")
    saliency = ranked_saliency(problem.graph, problem.scores, scale)
    return problem.walk(partial(block_losses, saliency), by_cost=False)
