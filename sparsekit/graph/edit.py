"""without(), only(), compact_graph(), tie_layers(): a graph with fewer groups, fewer units, or more ties."""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import FreeLength, Leftover, NormSite, SizeAttribute, UnitGroup, UnitSlice, Unprunable
from sparsekit.graph.index import inverse_index, narrow_shape
from sparsekit.graph.mask import UnitMask

_REASON = "left out on purpose"
Place = TypeVar("Place", SizeAttribute, FreeLength, NormSite, Leftover)


def without(graph: UnitGraph, groups: Collection[str]) -> UnitGraph:
    """Return a new graph of the same model without some groups: their units count as unprunable.

    Args:
        graph: Any graph. Not changed.
        groups: Names of the groups to leave out. Tied groups are left out together or not at all.

    Raises:
        UnknownNameError: no group has such a name.
        InvalidValueError: one of several tied groups is named and another is not, or `groups` is a single string.
    """
    left_out = _checked(graph, groups)
    kept = {name: group for name, group in graph.groups.items() if name not in left_out}
    norms = (replace(site, units={name: at for name, at in site.units.items() if name in kept}) for site in graph.norms)
    constants = {piece.name for group in kept.values() for piece in group.constants}
    return _derived(
        graph,
        groups=kept,
        constants={name: constant for name, constant in graph.constants.items() if name in constants},
        ties=tuple(tied for tied in graph.ties if set(tied) <= kept.keys()),
        sizes=tuple(size for size in graph.sizes if size.group in kept),
        free=tuple(each for each in graph.free if each.group in kept),
        norms=tuple(site for site in norms if site.units),
        unprunable=(
            *graph.unprunable,
            *(Unprunable(name, group.size, _REASON, "choice") for name, group in graph.groups.items() if name in left_out),
        ),
    )


def only(graph: UnitGraph, groups: Collection[str]) -> UnitGraph:
    """Return the graph with only some groups, named as for `without`. The units of all other groups become unprunable."""
    return without(graph, graph.groups.keys() - _checked(graph, groups))


def inside(graph: UnitGraph, home: str) -> UnitGraph:
    """Return the graph of one module, named relative to it. Of the tensors of a unit, only those inside the module stay."""
    cut = len(home) + 1

    def is_inside(name: str) -> bool:
        return f"{name}.".startswith(f"{home}.")

    def own(pieces: Sequence[UnitSlice]) -> tuple[UnitSlice, ...]:
        return tuple(replace(piece, name=piece.name[cut:]) for piece in pieces if is_inside(piece.name))

    def moved(places: Sequence[Place]) -> tuple[Place, ...]:
        return tuple(replace(place, module=place.module[cut:]) for place in places if is_inside(place.module))

    return replace(
        graph,
        groups={n: replace(g, slices=own(g.slices), constants=own(g.constants)) for n, g in graph.groups.items()},
        shapes={name[cut:]: shape for name, shape in graph.shapes.items() if is_inside(name)},
        constants={n[cut:]: replace(c, module=c.module[cut:]) for n, c in graph.constants.items() if is_inside(n)},
        sizes=moved(graph.sizes),
        free=moved(graph.free),
        norms=moved(graph.norms),
        leftovers=moved(graph.leftovers),
    )


def _derived(graph: UnitGraph, **changes: Any) -> UnitGraph:
    derived = replace(graph, **changes)
    derived.checks.extend(graph.checks)
    return derived


def compact_graph(graph: UnitGraph, mask: UnitMask) -> UnitGraph:
    """Return the graph of the compacted model: the same groups with the kept units, in the same order.

    Raises:
        ForeignMaskError: the mask belongs to another graph.
    """
    mask.check(graph)
    graph, mask = mask.shortened(graph)
    kept, numbers, shapes = graph.kept_indices(mask), graph.numbers(mask.counts()), dict(graph.shapes)
    constants = graph.kept_constants(mask)
    shapes |= {name: constant.shape for name, constant in graph.constants.items()}

    def cut(pieces: Sequence[UnitSlice], keep: Tensor) -> tuple[UnitSlice, ...]:
        where = [inverse_index((kept | constants)[piece.name][piece.dim], shapes[piece.name][piece.dim]) for piece in pieces]
        return tuple(replace(piece, index=at[piece.index.cpu()[keep]]) for piece, at in zip(pieces, where, strict=True))

    def smaller(group: UnitGroup) -> UnitGroup:
        keep = mask[group.name]
        slices, held = cut(group.slices, keep), cut(group.constants, keep)
        return replace(group, size=int(keep.sum()), slices=slices, constants=held)

    def site(norm: NormSite) -> NormSite:
        stays = norm.stays(mask)
        place = inverse_index(torch.arange(norm.size)[stays], norm.size)
        found = {}
        for name, (positions, units) in norm.units.items():
            keep = mask[name][units]
            number = inverse_index(torch.arange(mask[name].numel())[mask[name]], mask[name].numel())
            found[name] = (place[positions[keep]], number[units[keep]])
        return replace(norm, size=int(stays.sum()), units=found)

    return _derived(
        graph,
        groups={name: smaller(group) for name, group in graph.groups.items()},
        constants={
            name: replace(constant, shape=narrow_shape(constant.shape, constants.get(name, {})))
            for name, constant in graph.constants.items()
        },
        shapes={name: narrow_shape(shape, kept.get(name, {})) for name, shape in graph.shapes.items()},
        sizes=tuple(replace(size, dense=numbers[size.module, size.path]) for size in graph.sizes),
        norms=tuple(site(norm) for norm in graph.norms),
    )


def within(mask: UnitMask, later: UnitMask) -> UnitMask:
    """Combine the masks of two successive pruning steps. `later` is a mask of the model that was compacted with `mask`."""
    found = {name: keep.masked_scatter(keep, later[name]) if name in later else keep for name, keep in mask.items()}
    return UnitMask(found, removed=mask.removed | later.removed)


def _checked(graph: UnitGraph, groups: Collection[str]) -> frozenset[str]:
    if isinstance(groups, str):
        raise InvalidValueError(f"groups must be a collection of names, got the string {groups!r}; pass [{groups!r}]")
    for name in groups:
        if name not in graph.groups:
            raise UnknownNameError(f"no group {name!r} in this graph; {nearest(name, graph.groups)}")
    named = frozenset(groups)
    for tied in graph.tied_sets:
        if named & set(tied) and not named >= set(tied):
            raise InvalidValueError(
                f"groups {', '.join(tied)} share one size and must keep equally many units; name all of them or none"
            )
    return named


def tie_layers(graph: UnitGraph) -> UnitGraph:
    """Return the graph with like groups of all layers tied, so that every allocation keeps equally many units of each.

    Use it if a configuration must describe the pruned model, which needs layers of equal shapes. Groups are alike if only
    numbers in their names differ (`layers.0.mlp`, `layers.7.mlp`) and their sizes and kinds are equal.
    """
    alike: dict[tuple[str, int, str], list[str]] = {}
    for name, group in graph.groups.items():
        alike.setdefault((re.sub(r"\d+", "#", name), group.size, group.kind), []).append(name)
    added = (tuple(names) for names in alike.values() if len(names) > 1)
    return replace(graph, ties=(*graph.ties, *(tied for tied in added if tied not in graph.ties)))
