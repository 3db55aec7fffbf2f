"""Select groups and blocks by the name of a layer, a regular expression, a type of module, or the module itself."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import TypeAlias, get_args

from torch import nn

from sparsekit.allocation.limits import Limits, check_limits
from sparsekit.allocation.shares import check_ratio
from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit.graph.blocks import is_inside
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import Kind

Selector: TypeAlias = str | type[nn.Module] | nn.Module
"""The name of a group or module, a regular expression over these names, a kind of unit, a type of module, or a module."""

Ratios: TypeAlias = float | Mapping[Selector, float]
"""Share of the units that every layer keeps, or layer → share."""

_KINDS = get_args(Kind)
_NOTHING = (
    "{!r} makes no units that could be removed, so its {} means nothing; `sparsekit units` lists the groups and why others are"
    " fixed"
)


def _is_inside(name: str, roots: Iterable[str]) -> bool:
    return any(root in ("", name) or name.startswith(f"{root}.") for root in roots)


def makers(graph: UnitGraph) -> dict[str, tuple[str, ...]]:
    """Return group name → names of the modules that produce its units, in the order of the slices."""
    return {
        name: tuple(dict.fromkeys(piece.name.rpartition(".")[0] for piece in group.slices if piece.side == "out"))
        for name, group in graph.groups.items()
    }


def select_groups(model: nn.Module, graph: UnitGraph, selector: Selector) -> tuple[str, ...]:
    """Return the names of the groups whose units the selected modules produce, in the order of the graph.

    A name selects a group, or a module with everything inside it. If no module has such a name, a kind of unit, such as
    "head", selects all units of the kind. Any other text is a regular expression that must match the whole name of a group
    or of a module that produces its units. The result is empty if the selected units cannot be pruned.
    """
    modules, made = dict(model.named_modules()), makers(graph)
    if selector in _KINDS and selector not in {*graph.groups, *modules}:
        return tuple(name for name, group in graph.groups.items() if group.kind == selector)
    chosen = _select(modules, selector, graph.groups, type(model).__name__)
    if not any(name in graph.groups or next(modules[name].parameters(), None) is not None for name in chosen):
        raise InvalidValueError(
            f"{selector!r} selects layers without weights, which make no units; select the layers whose units they pass on"
        )
    return tuple(name for name in graph.groups if name in chosen or chosen & set(made[name]))


def _select(modules: Mapping[str, nn.Module], selector: Selector, groups: Collection[str], model: str) -> set[str]:
    if isinstance(selector, str):
        if selector not in groups and selector not in modules:
            return _matching(selector, {*modules, *groups} - {""})
        return {selector, *(name for name in modules if _is_inside(name, (selector,)))}
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        chosen = {name for name, module in modules.items() if isinstance(module, selector)}
        if chosen:
            return chosen
        types = {type(module).__name__ for module in modules.values()}
        raise UnknownNameError(f"the model has no module of type {selector.__name__!r}; {nearest(selector.__name__, types)}")
    if isinstance(selector, nn.Module):
        homes = [name for name, module in modules.items() if module is selector]
        if homes:
            return {name for name in modules if _is_inside(name, homes)}
        raise UnknownNameError(
            f"this {type(selector).__name__} is not a module of the {model} that is pruned; pass a module of that model, or its"
            " name"
        )
    raise InvalidValueError(
        f"a layer is selected by name, regular expression, type or module, got {selector!r} of {type(selector).__name__}"
    )


def _matching(pattern: str, names: set[str]) -> set[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise InvalidValueError(f"{pattern!r} is neither a name nor a regular expression: {error}") from None
    found = {name for name in names if compiled.fullmatch(name)}
    if not found:
        raise UnknownNameError(
            f"{pattern!r} selects nothing: no group or module has that name, and none is matched by it as a whole;"
            f" {nearest(pattern, names, most=20)}"
        )
    return found


def read_ratios(model: nn.Module, graph: UnitGraph, ratio: Ratios) -> float | dict[str, float]:
    """Return a single ratio unchanged, or group name → ratio. Names of groups precede other selectors, and the first counts."""
    if not isinstance(ratio, Mapping):
        return check_ratio(ratio)
    found: dict[str, float] = {}
    for selector, share in sorted(ratio.items(), key=lambda item: item[0] not in graph.groups):
        groups = select_groups(model, graph, selector)
        if not groups:
            raise InvalidValueError(_NOTHING.format(selector, "ratio"))
        found = dict.fromkeys(groups, check_ratio(share)) | found
    return found


def free_blocks(
    model: nn.Module, graph: UnitGraph, exclude: Iterable[Selector], limits: Mapping[Selector, tuple[float, float]]
) -> tuple[str, ...]:
    """Return the blocks that may be removed, in forward order: neither `exclude` nor a limit above zero selects them."""
    kept = [*exclude, *(selector for selector, (least, _) in limits.items() if least > 0)]
    chosen = set().union(*(select_blocks(model, graph, selector) for selector in kept))
    return tuple(name for name in graph.blocks if name not in chosen)


def select_blocks(model: nn.Module, graph: UnitGraph, selector: Selector) -> tuple[str, ...]:
    """Return the blocks that a selector selects: by the block itself, a module around or within it, or the kind "block"."""
    modules = dict(model.named_modules())
    if selector in _KINDS and selector not in {*graph.groups, *modules}:
        return tuple(graph.blocks) if selector == "block" else ()
    chosen = _select(modules, selector, graph.groups, type(model).__name__)
    return tuple(name for name in graph.blocks if any(is_inside(each, [name]) for each in chosen))


def read_limits(
    model: nn.Module, graph: UnitGraph, exclude: Iterable[Selector], limits: Mapping[Selector, tuple[float, float]],
    ratio: Ratios | None = None,
) -> Limits:  # fmt: skip
    """Return limits by group. Several limits of a group all apply. `exclude` overrides them, also for tied groups.

    Ranks of adapters stay unless a selector of `limits` or `ratio` selects ranks alone.
    """
    if isinstance(exclude, str | type | nn.Module):
        raise InvalidValueError(f"exclude must be a list of selections, got {exclude!r}; pass [{exclude!r}]")
    found: dict[str, tuple[float, float]] = {}
    for selector, pair in limits.items():
        check_limits({str(selector): pair})
        groups = select_groups(model, graph, selector)
        if not groups and not select_blocks(model, graph, selector):
            raise InvalidValueError(_NOTHING.format(selector, "limit"))
        for name in groups:
            old = found.get(name, (0.0, 1.0))
            found[name] = max(old[0], pair[0]), min(old[1], pair[1])
            if found[name][0] > found[name][1]:
                raise InvalidValueError(
                    f"the limits of group {name!r} contradict each other, with {selector!r} last; exclude overrides limits"
                )
    ranks = {name for name, group in graph.groups.items() if group.kind == "rank"}
    named = [*limits, *(ratio if isinstance(ratio, Mapping) else ())] if ranks else []
    asked = (set(select_groups(model, graph, selector)) for selector in named)
    found |= dict.fromkeys(ranks.difference(*(names for names in asked if names <= ranks)), (1.0, 1.0))
    kept = {name for selector in exclude for name in select_groups(model, graph, selector)}
    for groups in graph.tied_sets:
        if kept & set(groups):
            found.update(dict.fromkeys(groups, (1.0, 1.0)))
    return found
