"""sparsekit: structured sparsity that is learned while a network trains.

The public names are listed in `__all__`; anything else may change. Names are imported when first used, so that
`sparsekit.bandit` needs numpy alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsekit import bandit, errors
    from sparsekit import criteria as patterns
    from sparsekit.bandit import PUCBV, Bandit, Box, Interval, Pull, SplitUCBV
    from sparsekit.criteria.base import Pattern, PatternView, select
    from sparsekit.graph.graph import UnitGraph, UnitGroup, UnitSlice
    from sparsekit.graph.mask import UnitMask, WeightMask
    from sparsekit.measure.cost import Cost, count_cost
    from sparsekit.surgery.compaction import compact, expand
    from sparsekit.surgery.optimizer_state import remap_optimizer
    from sparsekit.surgery.saving import load_compact, load_mask, save_compact
    from sparsekit.tracing.trace import trace_units
    from sparsekit.training.learnable import LearnableMask
    from sparsekit.training.narrow_model import NarrowModel

__version__ = "0.1.0"

_HOME = {
    "Bandit": "sparsekit.bandit",
    "Box": "sparsekit.bandit",
    "NarrowModel": "sparsekit.training.narrow_model",
    "Cost": "sparsekit.measure.cost",
    "Interval": "sparsekit.bandit",
    "LearnableMask": "sparsekit.training.learnable",
    "PUCBV": "sparsekit.bandit",
    "Pattern": "sparsekit.criteria.base",
    "PatternView": "sparsekit.criteria.base",
    "Pull": "sparsekit.bandit",
    "SplitUCBV": "sparsekit.bandit",
    "UnitGraph": "sparsekit.graph.graph",
    "UnitGroup": "sparsekit.graph.graph",
    "UnitMask": "sparsekit.graph.mask",
    "UnitSlice": "sparsekit.graph.graph",
    "WeightMask": "sparsekit.graph.mask",
    "bandit": "sparsekit.bandit",
    "compact": "sparsekit.surgery.compaction",
    "count_cost": "sparsekit.measure.cost",
    "errors": "sparsekit.errors",
    "expand": "sparsekit.surgery.compaction",
    "load_compact": "sparsekit.surgery.saving",
    "load_mask": "sparsekit.surgery.saving",
    "patterns": "sparsekit.criteria",
    "remap_optimizer": "sparsekit.surgery.optimizer_state",
    "save_compact": "sparsekit.surgery.saving",
    "select": "sparsekit.criteria.base",
    "trace_units": "sparsekit.tracing.trace",
}

__all__ = [
    "PUCBV",
    "Bandit",
    "Box",
    "Cost",
    "Interval",
    "LearnableMask",
    "NarrowModel",
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
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
