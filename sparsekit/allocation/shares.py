"""Convert shares to numbers of units, and scores to masks. No other module rounds shares or selects units by scores."""

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from numbers import Real

import torch
from torch import Tensor

from sparsekit.allocation.limits import Counts, Free, free_counts, spread
from sparsekit.allocation.problem import Problem
from sparsekit.criteria.base import Criterion, ScoringContext, check_scores, refuse_nan, score_units
from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit.graph import UnitGraph, UnitMask


def check_ratio(ratio: float) -> float:
    """Return `ratio` as a float, or raise InvalidValueError if it is not in (0, 1]."""
    if isinstance(ratio, bool) or not isinstance(ratio, Real):
        raise InvalidValueError(
            f"ratio must be in (0, 1], got {ratio!r} of type {type(ratio).__name__}; pass a number, such as 0.5"
        )
    if not 0.0 < ratio <= 1.0:
        advice = f"for {ratio:g} % pass {ratio / 100:g}" if 1.0 < ratio <= 100.0 else "to prune 30 % pass 0.7"
        least = ", and at least one unit of a group always stays" if ratio == 0 else ""
        raise InvalidValueError(f"ratio must be in (0, 1], got {ratio!r}; a ratio is the share kept, so {advice}{least}")
    return float(ratio)


def keep_count(ratio: float, size: int) -> int:
    """Return max(1, ⌈ratio · size⌉), robust to rounding errors: ⌈0.1 · 10⌉ is 1."""
    return max(1, min(size, math.ceil(check_ratio(ratio) * size - 1e-9)))


def ratio_counts(graph: UnitGraph, ratios: float | Mapping[str, float], *, default: float = 1.0) -> dict[str, int]:
    """Return max(1, ⌈ratio · size⌉) units of each group; 0.25 of 10 units are 3.

    Args:
        graph: The groups; tied groups take the least of their numbers.
        ratios: Share of units kept in every group, in (0, 1]; or name of a group, or regular expression that matches all of it
            → share. Names take precedence over expressions, and earlier expressions over later ones.
        default: The share of groups that a mapping does not name.

    Returns:
        Group name → units kept.

    Raises:
        InvalidValueError: a share outside (0, 1], or an entry of `ratios` that is neither a group nor an expression.
        UnknownNameError: an entry of `ratios` names and matches no group.
    """
    return _ratio_counts(graph, free_counts(graph, {}, 1), ratios, default)


def by_ratio(problem: Problem, *, ratios: float | Mapping[str, float], default: float = 1.0) -> Counts:
    """Keep at least max(1, ⌈ratio · size⌉) units of each group, regardless of the budget.

    ```python
    sk.prune(model, (x,), allocation=functools.partial(by_ratio, ratios={"conv1": 0.5, r"layer1\\..*": 0.75}))
    ```

    Args:
        problem: Groups, limits and multiples; numbers are rounded up to allowed ones.
        ratios: As in `ratio_counts`.
        default: The share of groups that a mapping does not name.
    """
    return _ratio_counts(problem.graph, problem.free, ratios, default)


def _ratio_counts(graph: UnitGraph, free: Free, ratios: float | Mapping[str, float], default: float) -> dict[str, int]:
    shares = ratios if isinstance(ratios, Mapping) else {}
    default = check_ratio(default if isinstance(ratios, Mapping) else ratios)
    found = {name: share for name, share in shares.items() if name in graph.groups}
    for name, share in shares.items():
        check_ratio(share)
        try:
            matched = [name] if name in graph.groups else [group for group in graph.groups if re.fullmatch(name, group)]
        except re.error as error:
            raise InvalidValueError(f"{name!r} is neither a group nor a regular expression: {error}") from None
        if not matched:
            raise UnknownNameError(f"{name!r} names and matches no group; {nearest(name, graph.groups)}")
        found = dict.fromkeys(matched, share) | found

    def pick(groups: tuple[str, ...], counts: tuple[int, ...]) -> int:
        wanted = min(keep_count(found.get(name, default), graph.groups[name].size) for name in groups)
        return counts[min(bisect_left(counts, wanted), len(counts) - 1)]

    return spread(free, pick)


def uniform(problem: Problem) -> Counts:
    """Keep max(1, ⌈ratio · size⌉) units of each group, rounded down to multiples, for the largest ratio within the budget.

    No units are put back afterwards, so layers of equal size keep equal widths, which a configuration file can describe.

    Args:
        problem: Groups, costs and budget.

    Raises:
        InvalidValueError: no budget.
    """
    problem.require_budget("uniform")

    def at(cut: float) -> Counts:
        def pick(groups: tuple[str, ...], counts: tuple[int, ...]) -> int:
            wanted = keep_count(max(1 - cut, 1e-9), problem.graph.groups[groups[0]].size)
            return counts[max(0, bisect_right(counts, wanted) - 1)]

        return spread(problem.free, pick)

    low, high = 0.0, 1.0
    best = at(low)
    if problem.fits(best):
        return best
    best = at(high)
    for _ in range(48):
        middle = (low + high) / 2
        found = at(middle)
        if problem.fits(found):
            best, high = found, middle
        else:
            low = middle
    return best


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
        # Not every float dtype can be sorted; float32 and float64 hold all of them exactly.
        own = scores[name].detach().cpu()
        values = own if own.dtype == torch.float64 else own.float()
        refuse_nan(values, f"{source} of group {name!r}")
        keep = entries[name] = torch.zeros(group.size, dtype=torch.bool)
        keep[torch.sort(values, descending=True, stable=True).indices[:count]] = True
    graph.check_counts(counts)
    return UnitMask(entries)


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
