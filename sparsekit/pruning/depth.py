"""Depth: residual branches that go whole, chosen under the same budget as the widths of what is left."""

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import nn

from sparsekit.allocation.limits import check_limits
from sparsekit.allocation.worth import ranked_worth
from sparsekit.criteria.base import Criterion, View, is_comparable, score_units
from sparsekit.criteria.batches import DataDriven, call_model, example_count, read_batches, scoring
from sparsekit.errors import InvalidValueError
from sparsekit.graph.edit import remaining
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import Kind
from sparsekit.layers import LayerRule
from sparsekit.measure.budget import Budget, BudgetError
from sparsekit.measure.cost import measure_costs
from sparsekit.pruning.plans import for_rest
from sparsekit.pruning.selection import Selector, is_inside, makers, select_groups, select_modules
from sparsekit.pruning.steps import Start
from sparsekit.surgery.rebuild import named_entries
from sparsekit.surgery.removed import Blocks, remove_blocks
from sparsekit.tracing.inputs import ModelInputs
from sparsekit.tracing.residual import find_blocks

_PLANS = 12  # about as many numbers of branches are tried, evenly spaced
_SLACK = 0.01  # of a budget, for which it is worth to look which branches may stay after all
_BATCHES = 8  # of the batches of a criterion, on which each branch is left out once

KINDS = ("block", "layer")
"""What goes whole: a residual branch, or all branches of a module that does nothing but add them."""


def read_depth(
    model: nn.Module, limits: Mapping[Selector, tuple[float, float]]
) -> tuple[tuple[str, float, float] | None, dict[Selector, tuple[float, float]]]:
    """Tell the limit of the kind "block" or "layer" from the others.

    Returns:
        (kind, least and largest share that stays), or None where branches stay; and the other limits.

    Raises:
        InvalidValueError: both kinds, or shares that are none.
    """
    modules = dict(model.named_modules())
    asked = [kind for kind in KINDS if kind in limits and kind not in modules]
    rest = {selector: pair for selector, pair in limits.items() if selector not in asked}
    if not asked:
        return None, rest
    if len(asked) > 1:
        raise InvalidValueError("limits has both 'block' and 'layer'; a layer is all of its blocks, so give one of them")
    least, largest = limits[asked[0]]
    check_limits({asked[0]: (least, largest or 1.0)})
    return (asked[0], float(least), float(largest)), rest


def go_shallow(
    start: Start,
    calls: Sequence[ModelInputs],
    asked: tuple[str, float, float],
    *,
    keep: Iterable[Selector],
    limits: Mapping[Selector, tuple[float, float]],
    criterion: Criterion,
    generator: torch.Generator,
    rules: Mapping[type[nn.Module], LayerRule] | None,
) -> Start:
    """Remove the branches that are worth less for their FLOPs than the units which would go in their place.

    Branches are ranked by worth for FLOPs. Of several numbers of them, from the front of that order, the one is taken with
    which all that goes, branches and units, is worth least. A branch is worth what the loss rises by without it, where the
    criterion has batches and its scores compare across layers; else what the units inside it are worth together.

    Args:
        start: The dense model.
        calls: What it is called on.
        asked: Kind, least and largest share of them that stays.
        keep: Selections of which no branch goes.
        limits: Selection → (least, largest); the least holds for the branches of the selection, too.
        criterion, generator, rules: As for `prune`.

    Returns:
        What is left, with allocation and budget for it.

    Raises:
        InvalidValueError: the model has no residual branches, or the limits leave no number of them.
        BudgetError: the budget cannot be met.
    """
    kind, least, largest = asked
    found = find_blocks(start.model, calls)
    units = _units(found, kind)
    if not units:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(found.refused.items())[:5])
        raise InvalidValueError(
            f"{type(start.model).__name__} has no {kind} that can be removed: no residual branch whose values are added to what"
            f" they are computed from, and read by nothing else{f' ({reasons})' if reasons else ''}; leave {kind!r} out of"
            " limits"
        )
    held = _held(start.model, start.graph, found, units, keep, limits)
    most = len(units) - math.ceil(least * len(units) - 1e-9)
    fewest = len(units) - math.floor(largest * len(units) + 1e-9)
    view = View(weights=start.model.state_dict(), model=start.model, generator=generator)
    scores = score_units(criterion, start.graph, view)
    if isinstance(criterion, DataDriven) and criterion.batches is not None and is_comparable(criterion):
        worth = ranked_worth(start.graph, scores, "none")
        own = _losses(start.model, found, units, criterion)
    else:
        worth = ranked_worth(start.graph, scores, "share_of_remaining")
        own = _sums(start, found, units, worth)
    flops = {name: sum(found.blocks[block].flops for block in blocks) for name, blocks in units.items()}
    order: list[str] = []
    for name in sorted(units, key=lambda name: (own[name] / max(1, flops[name]), name)):
        if len(order) < most and all(name not in same or len(same.intersection(order)) < limit for same, limit in held):
            order.append(name)
    if fewest > len(order):
        raise InvalidValueError(
            f"at most {largest:.0%} of {len(units)} may stay of kind {kind!r}, but keep and limits let only {len(order)} go"
        )
    absolute = None if start.budget is None else Budget(**start.budget.limits(start.costs.dense_costs()))

    def plan(gone: Sequence[str]) -> tuple[float, Sequence[str], Start]:
        """What is lost where these go, and what is left; without an allocation within the budget it is an error."""
        model, graph, costs = start.model, start.graph, start.costs
        if gone:
            model = remove_blocks(model, found, [block for name in gone for block in units[name]], share=True)
            graph = remaining(graph, set(named_entries(model)), {name for name, _ in model.named_modules()})
            metrics = absolute.metrics if absolute is not None else ()
            costs = measure_costs(model, calls[0].args, calls[0].kwargs, graph, metrics, rules)
        left = Start(model, graph, costs, for_rest(start.allocation, absolute, start.graph, graph), absolute)
        counts = left.allocation.counts(graph, {name: scores[name] for name in graph.groups}, costs)
        lost = sum(float(worth[name][counts[name] :].sum()) for name in graph.groups)
        return lost + sum(max(0.0, own[name]) for name in gone), gone, left

    tried: list[tuple[float, Sequence[str], Start]] = []
    refused = BudgetError("no number of branches was tried")
    last = len(order) if absolute is not None else fewest
    for number in sorted({*range(fewest, last + 1, max(1, math.ceil((last - fewest) / _PLANS))), last}):
        try:
            tried.append(plan(order[:number]))
        except BudgetError as error:
            refused = error
    if not tried:
        raise refused
    lost, gone, best = min(tried, key=lambda item: (item[0], len(item[1])))
    for name in list(gone)[::-1] if _slack(best, absolute) > _SLACK else ():  # what was dear may fit after all
        if len(gone) > fewest:
            with contextlib.suppress(BudgetError):
                other = plan([each for each in gone if each != name])
                lost, gone, best = other if other[0] <= lost else (lost, gone, best)
    rows = {name: _modules(found, blocks) for name, blocks in units.items()}
    told = f"{len(gone)} of {len(units)} residual {kind}s are gone{': ' if gone else ''}{', '.join(gone)}."
    return replace(best, kind=kind, branches=rows, gone=frozenset(gone), notes=(told,))


def _slack(start: Start, budget: Budget | None) -> float:
    """The share of the budget that is left where no width is cut."""
    if budget is None:
        return 0.0
    dense = start.costs.dense_costs()
    return min(1 - dense[name] / limit for name, limit in budget.limits(dense).items())


def _units(found: Blocks, kind: str) -> dict[str, tuple[str, ...]]:
    """Name → the branches that go together."""
    if kind == "block":
        return {name: (name,) for name in found.blocks}
    every = [set(blocks) for _, blocks in found.layers]
    return {part.module: blocks for part, blocks in found.layers if not any(other < set(blocks) for other in every)}


def _held(
    model: nn.Module,
    graph: UnitGraph,
    found: Blocks,
    units: Mapping[str, tuple[str, ...]],
    keep: Iterable[Selector],
    limits: Mapping[Selector, tuple[float, float]],
) -> list[tuple[set[str], int]]:
    """Sets of units, and how many of each may go at most."""

    def meant(selector: Selector) -> set[str]:
        if selector in get_args(Kind):  # units of some width stay where they are, but not against a branch that goes whole
            return set()
        chosen = select_modules(model, selector, found.blocks)
        return {
            name
            for name, blocks in units.items()
            if name in chosen or any(is_inside(each, [*blocks, *_modules(found, blocks)]) for each in chosen)
        }

    held = [(meant(selector), 0) for selector in keep]
    for selector, (least, _) in limits.items():
        check_limits({str(selector): (least, 1.0)})
        same = meant(selector)
        if not same and not select_groups(model, graph, selector):
            raise InvalidValueError(
                f"{selector!r} makes no units and is no branch that could be removed; its limit means nothing"
            )
        held.append((same, len(same) - math.ceil(least * len(same) - 1e-9)))
    return held


def _modules(found: Blocks, blocks: Sequence[str]) -> tuple[str, ...]:
    """The outermost modules that run nothing but these branches."""
    return tuple(module for block in blocks for module in found.blocks[block].modules)


def _losses(model: nn.Module, found: Blocks, units: Mapping[str, tuple[str, ...]], criterion: DataDriven) -> dict[str, float]:
    """What the mean loss rises by without each unit."""
    assert criterion.batches is not None
    limit = min(_BATCHES, criterion.limit or _BATCHES)
    batches = list(read_batches(criterion.batches, model, "Branches", limit=limit, progress=criterion.progress))

    def mean(small: nn.Module) -> float:
        with scoring(small), torch.no_grad():
            parts = [(float(call_model(small, batch, criterion.loss)), example_count(batch)) for batch in batches]
        return sum(value * count for value, count in parts) / sum(count for _, count in parts)

    whole = mean(model)
    return {name: mean(remove_blocks(model, found, blocks, share=True)) - whole for name, blocks in units.items()}


def _sums(start: Start, found: Blocks, units: Mapping[str, tuple[str, ...]], worth: Mapping[str, Any]) -> dict[str, float]:
    """What the units inside are worth together; without units nothing is known, and the branch goes last."""
    homes = makers(start.graph)
    sums = {}
    for unit, blocks in units.items():
        own = [part.module for block in blocks for part in found.blocks[block].parts] or list(
            {part.module for part, inside in found.layers if set(inside) <= set(blocks)}
        )
        inner = [name for name, modules in homes.items() if all(is_inside(module, own) for module in modules)]
        sums[unit] = sum(float(worth[name].sum()) for name in inner) if inner else math.inf
    return sums
