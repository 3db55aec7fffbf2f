"""Pattern, PatternView and select(): from a ratio to the units that stay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph, UnitGroup
from sparsekit.graph.mask import UnitMask
from sparsekit.graph.state import StateDict

__all__ = ["Pattern", "PatternView", "check_ratio", "keep_count", "keep_largest", "select"]


@dataclass(frozen=True, kw_only=True)
class PatternView:
    """All that a pattern may look at.

    Args:
        round: The server round, counted from 1; 0 is before training.
        importance: Group name → float (units,), larger stays.
        weights: The dense state.
        previous: The mask that stood before.
        generator: For patterns that draw.
    """

    round: int = 0
    importance: Mapping[str, Tensor] | None = None
    weights: StateDict | None = None
    previous: UnitMask | None = None
    generator: torch.Generator | None = None


@runtime_checkable
class Pattern(Protocol):
    """The rule that picks which units of a group stay."""

    def keep(self, group: UnitGroup, count: int, view: PatternView) -> Tensor:
        """Pick units.

        Args:
            group: The units to choose from.
            count: How many to keep, in [1, group.size].
            view: What the choice may depend on.

        Returns:
            bool (units,), exactly `count` of them True.
        """
        ...


def check_ratio(ratio: float) -> float:
    """Return `ratio` as a float, or raise.

    Raises:
        InvalidValueError: not in (0, 1], or NaN.
    """
    if isinstance(ratio, bool) or not isinstance(ratio, Real):
        raise InvalidValueError(
            f"ratio must be in (0, 1], got {ratio!r} of type {type(ratio).__name__}; pass a number, such as 0.5"
        )
    if not 0.0 < ratio <= 1.0:
        advice = ""
        if 1.0 < ratio <= 100.0:
            advice = f"; a ratio is the share kept, so for {ratio:g} % pass {ratio / 100:g}"
        elif ratio == 0:
            advice = "; a ratio is the share kept, so to prune 30 % pass 0.7, and at least one unit of a group always stays"
        else:
            advice = "; a ratio is the share kept, so to prune 30 % pass 0.7"
        raise InvalidValueError(f"ratio must be in (0, 1], got {ratio!r}{advice}")
    return float(ratio)


def keep_count(ratio: float, size: int) -> int:
    """max(1, ⌈ratio · size⌉), safe against the last bit: ⌈0.1 · 10⌉ is 1.

    Args:
        ratio: Share kept, in (0, 1].
        size: Number of units, J of the layer.
    """
    return max(1, min(size, math.ceil(check_ratio(ratio) * size - 1e-9)))


def keep_largest(scores: Tensor, count: int) -> Tensor:
    """bool (units,): the `count` largest scores; ties go to the lower index."""
    order = torch.sort(scores.detach().cpu(), descending=True, stable=True).indices
    keep = torch.zeros(scores.numel(), dtype=torch.bool)
    keep[order[:count]] = True
    return keep


def select(pattern: Pattern, graph: UnitGraph, ratio: float, view: PatternView) -> UnitMask:
    """Apply `pattern` to every group. The only place where a ratio becomes counts.

    Args:
        pattern: The rule.
        graph: The groups.
        ratio: Share of units kept in each group, in (0, 1]; max(1, ⌈ratio · size⌉) stay.
        view: What the pattern may look at.

    Returns:
        The mask.

    Raises:
        InvalidValueError: a ratio outside (0, 1], or a pattern that kept another number than asked.
    """
    check_ratio(ratio)
    entries: dict[str, Tensor] = {}
    for name, group in graph.groups.items():
        count = keep_count(ratio, group.size)
        keep = pattern.keep(group, count, view)
        if keep.shape != (group.size,) or int(keep.sum()) != count:
            raise InvalidValueError(
                f"{type(pattern).__name__} kept {int(keep.sum())} of {tuple(keep.shape)} units in {name!r};"
                f" it must return a bool tensor of shape ({group.size},) with exactly {count} True"
            )
        entries[name] = keep
    return UnitMask(entries)
