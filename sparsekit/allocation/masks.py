"""mask_from_scores() and make_mask(): the only place that turns scores into a mask."""

from collections.abc import Mapping

import torch
from torch import Tensor

from sparsekit.allocation.shares import ratio_counts
from sparsekit.criteria.base import Criterion, ScoringContext, check_scores, refuse_nan, score_units
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask


def mask_from_scores(
    graph: UnitGraph, scores: Mapping[str, Tensor], counts: Mapping[str, int], *, source: str = "scores"
) -> UnitMask:
    """Keep the units with the largest scores.

    Args:
        graph: The groups.
        scores: Group name → float (units,), larger stays; any device, any float dtype.
        counts: Group name → number of units kept, in [1, group.size]; equal in tied groups.
        source: Name of the source of the scores, for messages.

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
    """Return bool (units,) of the `count` largest: 0.1, 0.9, 0.5, 0.5 and 2 give False, True, True, False."""
    # Not every float dtype can be sorted; float32 and float64 hold all of them exactly.
    values = scores.cpu() if scores.dtype == torch.float64 else scores.cpu().float()
    refuse_nan(values, what)
    order = torch.sort(values, descending=True, stable=True).indices
    keep = torch.zeros(values.numel(), dtype=torch.bool)
    keep[order[:count]] = True
    return keep


def make_mask(criterion: Criterion, graph: UnitGraph, ratios: float | Mapping[str, float], context: ScoringContext) -> UnitMask:
    """Score the units, and keep the units with the largest scores in each group.

    Args:
        criterion: Scores the units.
        graph: The groups.
        ratios: Share of units kept in every group, in (0, 1], or one for each group, as in `ratio_counts`.
        context: The data for the criterion.

    Returns:
        The mask.

    Raises:
        InvalidValueError: a ratio outside (0, 1], or scores that do not fit the graph.
    """
    scores = score_units(criterion, graph, context)
    return mask_from_scores(graph, scores, ratio_counts(graph, ratios), source=f"{type(criterion).__name__} scores")
