"""choose() and select(): the only place where scores become a mask."""

from collections.abc import Mapping

import torch
from torch import Tensor

from sparsekit.allocation.base import Allocation
from sparsekit.allocation.shares import Uniform
from sparsekit.criteria.base import Criterion, View, check_scores, refuse_nan, score_units
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.measure.cost import CostModel


def choose(graph: UnitGraph, scores: Mapping[str, Tensor], counts: Mapping[str, int], *, source: str = "scores") -> UnitMask:
    """Keep the units of the largest scores.

    Args:
        graph: The groups.
        scores: Group name → float (units,), larger stays; any device, any float dtype.
        counts: Group name → number of units kept, in [1, group.size]; equal in tied groups.
        source: Name of what made the scores, for messages.

    Returns:
        The mask, on the CPU; ties go to the lower index.

    Raises:
        InvalidValueError: scores are missing, of another shape or NaN, or counts are out of range or differ in tied groups.
    """
    check_scores(graph, scores, source)
    entries: dict[str, Tensor] = {}
    for name, group in graph.groups.items():
        count = counts.get(name, 0)
        if not 1 <= count <= group.size:
            raise InvalidValueError(f"the count of group {name!r} must be in [1, {group.size}], got {counts.get(name)}")
        entries[name] = _largest(scores[name].detach(), count, f"{source} of group {name!r}")
    graph.check_counts(counts)
    return UnitMask(entries)


def _largest(scores: Tensor, count: int, what: str) -> Tensor:
    """bool (units,) of the `count` largest: 0.1, 0.9, 0.5, 0.5 and 2 give False, True, True, False."""
    # Not every float dtype can be sorted; float32 and float64 hold all of them exactly.
    values = scores.cpu() if scores.dtype == torch.float64 else scores.cpu().float()
    refuse_nan(values, what)
    order = torch.sort(values, descending=True, stable=True).indices
    keep = torch.zeros(values.numel(), dtype=torch.bool)
    keep[order[:count]] = True
    return keep


def select(
    criterion: Criterion,
    graph: UnitGraph,
    allocation: Allocation | float,
    view: View,
    *,
    cost: CostModel | None = None,
) -> UnitMask:
    """Score the units, count how many stay and choose.

    Args:
        criterion: What a unit is worth.
        graph: The groups.
        allocation: How many units stay in each group; a number is a ratio, the same share of every group, in (0, 1].
        view: What the criterion may look at.
        cost: What numbers of units cost, for allocations within a budget.

    Returns:
        The mask.

    Raises:
        InvalidValueError: a ratio outside (0, 1], or scores or counts that do not fit the graph.
    """
    allocation = allocation if isinstance(allocation, Allocation) else Uniform(allocation)
    scores = score_units(criterion, graph, view)
    return choose(graph, scores, allocation.counts(graph, scores, cost), source=f"{type(criterion).__name__} scores")
