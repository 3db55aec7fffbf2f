"""Sizes of layers that have no parameter to read them from: a norm without a scale still counts its channels."""

from __future__ import annotations

from collections.abc import Mapping

from sparsekit.graph.groups import SizeAttribute, UnitGroup
from sparsekit.labels.store import Cause, LabelStore
from sparsekit.labels.values import IntArray

__all__ = ["find_counts"]


def find_counts(
    store: LabelStore, root: IntArray, group_of: Mapping[int, str], groups: Mapping[str, UnitGroup]
) -> tuple[SizeAttribute, ...] | None:
    """Attributes that follow the units of one group.

    Args:
        store: What a trace has learnt. Units that must be counted but lie in several groups are fixed in it.
        root: The lowest node of each node's component.
        group_of: Root → name of the group that it is a unit of.
        groups: The groups.

    Returns:
        The attributes; None if units were fixed, so that groups must be built again.
    """
    found: dict[tuple[str, str], SizeAttribute] = {}
    fixed = False
    for nodes, module, size, needed in store.counts:
        names = [group_of.get(int(root[node])) if node >= 0 else None for node in nodes]
        if not any(names):
            continue
        group = names[0]
        if group is not None and len(set(names)) == 1 and len(names) % groups[group].size == 0:
            attribute = SizeAttribute(module, size, group, len(names) // groups[group].size)
            if found.setdefault((module, size), attribute) == attribute:
                continue
        if needed:
            fixed = True
            reason = f"its {size!r} counts units of more than one kind and has no scale to be read from"
            store.fix(nodes, Cause(module, reason, False))
    return None if fixed else tuple(found.values())
