"""sparsekit: structured sparsity that is learned while a network trains.

The public names are listed in `__all__`; anything else may change. Names are imported when first used, so that
`sparsekit.bandit` needs numpy alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsekit import bandit, errors, patterns
    from sparsekit.bandit import PUCBV, Bandit, Box, Interval, Pull, SplitUCBV
    from sparsekit.compaction import compact, expand
    from sparsekit.cost import Cost, count_cost
    from sparsekit.masks.learnable import LearnableMask
    from sparsekit.masks.mask import UnitMask, WeightMask
    from sparsekit.optimizers import remap_optimizer
    from sparsekit.patterns.base import Pattern, PatternView, select
    from sparsekit.saving import load_compact, load_mask, save_compact
    from sparsekit.session import CompactSession
    from sparsekit.units.graph import UnitGraph, UnitGroup, UnitSlice
    from sparsekit.units.trace import trace_units

__version__ = "0.1.0"

_HOME = {
    "Bandit": "sparsekit.bandit",
    "Box": "sparsekit.bandit",
    "CompactSession": "sparsekit.session",
    "Cost": "sparsekit.cost",
    "Interval": "sparsekit.bandit",
    "LearnableMask": "sparsekit.masks.learnable",
    "PUCBV": "sparsekit.bandit",
    "Pattern": "sparsekit.patterns.base",
    "PatternView": "sparsekit.patterns.base",
    "Pull": "sparsekit.bandit",
    "SplitUCBV": "sparsekit.bandit",
    "UnitGraph": "sparsekit.units.graph",
    "UnitGroup": "sparsekit.units.graph",
    "UnitMask": "sparsekit.masks.mask",
    "UnitSlice": "sparsekit.units.graph",
    "WeightMask": "sparsekit.masks.mask",
    "bandit": "sparsekit.bandit",
    "compact": "sparsekit.compaction",
    "count_cost": "sparsekit.cost",
    "errors": "sparsekit.errors",
    "expand": "sparsekit.compaction",
    "load_compact": "sparsekit.saving",
    "load_mask": "sparsekit.saving",
    "patterns": "sparsekit.patterns",
    "remap_optimizer": "sparsekit.optimizers",
    "save_compact": "sparsekit.saving",
    "select": "sparsekit.patterns.base",
    "trace_units": "sparsekit.units.trace",
}

__all__ = [
    "PUCBV",
    "Bandit",
    "Box",
    "CompactSession",
    "Cost",
    "Interval",
    "LearnableMask",
    "Pattern",
    "PatternView",
    "Pull",
    "SplitUCBV",
    "UnitGraph",
    "UnitGroup",
    "UnitMask",
    "UnitSlice",
    "WeightMask",
    "bandit",
    "compact",
    "count_cost",
    "errors",
    "expand",
    "load_compact",
    "load_mask",
    "patterns",
    "remap_optimizer",
    "save_compact",
    "select",
    "trace_units",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sparsekit' has no attribute {name!r}")
    module = importlib.import_module(_HOME[name])
    return module if _HOME[name] == f"sparsekit.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
