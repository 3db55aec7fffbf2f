"""Deprecated: patterns are criteria now, see `sparsekit.criteria`. Goes with sparsekit 0.3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from sparsekit.criteria.base import View
from sparsekit.deprecations import find_renamed
from sparsekit.graph.graph import UnitGroup

__all__: list[str] = []

_RENAMED = {
    "Pattern": ("sparsekit.patterns:_Pattern", "sparsekit.Criterion, which scores units"),
    "PatternView": ("sparsekit.patterns:_PatternView", "sparsekit.View"),
    **{name: (f"sparsekit.criteria:{name}", f"sparsekit.criteria.{name}") for name in ("Magnitude", "Ordered", "Random")},
    "Rolling": ("sparsekit_fl.policies.rolling:Rolling", "sparsekit_fl.policies.rolling.Rolling"),
    "TopImportance": ("sparsekit.criteria:Learned", "sparsekit.criteria.Learned"),
    "keep_count": ("sparsekit.allocation.uniform:keep_count", "sparsekit.allocation.Uniform(ratio).counts"),
    "registry": ("sparsekit.criteria:registry", "sparsekit.criteria.registry"),
    "select": ("sparsekit.allocation:select", "sparsekit.select"),
}


@dataclass(frozen=True, kw_only=True)
class _PatternView(View):
    """A view with the server round, which `sparsekit.View` has no more."""

    round: int = 0


@runtime_checkable
class _Pattern(Protocol):
    """What a criterion and an allocation replace: a rule that picks the units of a group."""

    def keep(self, group: UnitGroup, count: int, view: Any) -> Tensor:
        """Pick `count` units: bool (units,)."""
        ...


def __getattr__(name: str) -> Any:
    return find_renamed(__name__, name, _RENAMED)
