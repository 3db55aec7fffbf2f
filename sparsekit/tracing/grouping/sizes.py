"""Integers of the model's own modules that count units: found by their value and name, and set after a cut.

Hand-written attention keeps its number of heads in an attribute and reshapes with it. Which integers follow the heads is a
guess here; the verification is what decides whether the model is right with them.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from sparsekit.graph.groups import SizeAttribute, UnitGroup
from sparsekit.labels.tracer import Tracer
from sparsekit.labels.values import IntArray, Split

_WIDTHS = ("dim", "size", "width", "inner", "hidden", "embd", "embed", "model", "feature", "channel", "total", "out")
_OF_HEADS = ("inner", "all", "total", "split", "attn", "attention", "qkv", "heads")

_COUNT, _OWN_WIDTH, _SHARED_WIDTH = "count", "own width", "shared width"
# What follows the heads, tried in this order: the width of all heads together is mostly that of the model, which stays.
_CHOICES: tuple[frozenset[str | None], ...] = (
    frozenset({_COUNT, _OWN_WIDTH}),
    frozenset({_COUNT, _OWN_WIDTH, _SHARED_WIDTH}),
    frozenset({_COUNT}),
    frozenset(),
)


def _kind(name: str) -> str | None:
    """Return what an attribute of this name may be: a number of heads (`num_heads`, `n_head`, `nhead`, `heads`, `h`), the width
    of all heads together (`all_head_size`, `inner_dim`), or a width that may be that of the model too (`embed_dim`, `d`)."""
    name = name.lower().strip("_")
    if (name == "h" or name.endswith(("head", "heads"))) and not any(word in name for word in (*_WIDTHS, "per")):
        return _COUNT
    if "head" in name and not any(word in name for word in ("heads", "all", "total")):
        return None
    if name in ("c", "d", "e", "n") or any(word in name for word in _WIDTHS):
        return _OWN_WIDTH if any(word in name for word in _OF_HEADS) else _SHARED_WIDTH
    return None


def tie_splits(tracer: Tracer, root: IntArray) -> bool:
    """Tie positions where one axis of units was laid over several and nothing has said along which of them units differ.

    Code such as `view(batch, groups, -1)` wants equally many units in every group, so the last axis is the one of the units.

    Returns:
        True if anything was tied.
    """
    tied = False
    for split in tracer.splits:
        varying = _varying(split, root)
        for dim in varying[:-1]:
            first = np.broadcast_to(split.nodes.take([0], dim), split.nodes.shape)
            both = (first >= 0) & (split.nodes >= 0)
            apart = root[first[both]] != root[split.nodes[both]]
            if apart.any():
                tracer.united.append((first[both][apart], split.nodes[both][apart]))
                tied = True
    return tied


def _varying(split: Split, root: IntArray) -> list[int]:
    """Return axes of a split along which units differ."""
    units = np.where(split.nodes >= 0, root[split.nodes], split.nodes)
    return [dim for dim in range(units.ndim) if (units != units.take([0], dim)).any()]


def counted_sizes(
    tracer: Tracer, root: IntArray, group_of: Mapping[int, str], groups: Mapping[str, UnitGroup]
) -> tuple[SizeAttribute, ...]:
    """Return attributes that count the units of one group; where they count those of several, verification keeps these
    whole."""
    found: dict[tuple[str, str], SizeAttribute] = {}
    for nodes, module, attribute in tracer.counts:
        names = {group_of.get(int(root[node])) if node >= 0 else None for node in nodes}
        if len(names) == 1 and (group := names.pop()) is not None:
            size = SizeAttribute(module, attribute, group, len(nodes) // groups[group].size)
            found.setdefault((module, attribute), size)
    return tuple(found.values())


def find_sizes(
    tracer: Tracer, root: IntArray, group_of: Mapping[int, str], heads: Mapping[str, int]
) -> tuple[SizeAttribute, ...]:
    """Return all integers of modules that may follow the heads kept. `heads`: group of attention heads → number of heads."""
    found: dict[SizeAttribute, None] = {}
    for split in tracer.splits:
        varying = _varying(split, root) if split.numbers else []
        names = {group_of.get(int(r)) for r in np.unique(root[split.nodes[split.nodes >= 0]])} if varying else set()
        group = next(iter(names)) if len(names) == 1 else None
        if len(varying) == 1 and group is not None and group in heads:
            found |= dict.fromkeys(_followers(split, varying[0], group, heads[group]))
    return tuple(found)


def _followers(split: Split, dim: int, group: str, units: int) -> Sequence[SizeAttribute]:
    count = split.nodes.shape[dim]
    if count % units:
        return []
    others = [size for d, size in enumerate(split.nodes.shape) if d != dim]
    widths = {count * math.prod(some) for k in range(1, len(others) + 1) for some in combinations(others, k)}
    return [
        SizeAttribute(split.module, name, group, value // units)
        for name, value in split.numbers.items()
        if (kind := _kind(name)) is not None and (value == count if kind == _COUNT else value in widths)
    ]


def chosen_sizes(
    tracer: Tracer, candidates: Sequence[SizeAttribute]
) -> tuple[tuple[SizeAttribute, ...], tuple[tuple[str, ...], ...]]:
    """Return those integers that are taken to follow the heads, after the choices that have failed.

    Returns:
        The attributes, and the groups that must keep equally many units because they share one.
    """
    claims: dict[tuple[str, str], list[SizeAttribute]] = {}
    for size in candidates:
        if _kind(size.name) in _CHOICES[tracer.attempts.get(size.module, 0)]:
            claims.setdefault((size.module, size.name), []).append(size)
    agreed = [claim for claim in claims.values() if len({size.per_unit for size in claim}) == 1]
    shared = {tuple(size.group for size in claim) for claim in agreed if len(claim) > 1}
    return tuple(claim[0] for claim in agreed), tuple(sorted(shared))


def try_other_sizes(tracer: Tracer, candidates: Sequence[SizeAttribute], group: str) -> bool:
    """Choose other integers to follow the heads of a group whose removal was not exact; False if there is no choice left."""
    mine = [size for size in candidates if size.group == group]
    changed = False
    for module in {size.module for size in mine}:
        kinds = {_kind(size.name) for size in mine if size.module == module}
        now = tracer.attempts.get(module, 0)
        later = (n for n in range(now + 1, len(_CHOICES)) if _CHOICES[n] & kinds != _CHOICES[now] & kinds)
        following = next(later, None)
        if following is not None:
            tracer.attempts[module], changed = following, True
    return changed
