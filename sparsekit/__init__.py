"""sparsekit: structured sparsity that is learned while a network trains.

The public names are listed in `__all__`; anything else may change. Names are imported when first used, so that
`sparsekit.bandit` needs numpy alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sparsekit.deprecations import RENAMED, find_renamed
from sparsekit.version import __version__ as __version__

if TYPE_CHECKING:
    from sparsekit import allocation, bandit, criteria, errors, finetuning, layers
    from sparsekit.allocation.base import Allocation
    from sparsekit.allocation.choose import choose, select
    from sparsekit.bandit import PUCBV, Bandit, Box, Interval, Pull, SplitUCBV
    from sparsekit.criteria.base import Criterion, View
    from sparsekit.finetuning import compensate, finetune, recalibrate
    from sparsekit.graph.graph import UnitGraph
    from sparsekit.graph.groups import UnitGroup, UnitSlice
    from sparsekit.graph.mask import UnitMask, WeightMask
    from sparsekit.layers import LayerRule
    from sparsekit.measure.budget import Budget, BudgetError
    from sparsekit.measure.cost import Cost, count_cost
    from sparsekit.measure.model import cost_model
    from sparsekit.pruning.prune import prune
    from sparsekit.pruning.report import PruneReport
    from sparsekit.pruning.result import Pruned
    from sparsekit.surgery.compaction import compact, expand
    from sparsekit.surgery.optimizer_state import remap_optimizer
    from sparsekit.surgery.pretrained_config import fit_config
    from sparsekit.surgery.saving import load_compact, load_mask, save_compact
    from sparsekit.tracing.trace import trace_units
    from sparsekit.training.gradient_importance import GradientImportance
    from sparsekit.training.learnable import LearnableMask
    from sparsekit.training.loss_importance import LossImportance
    from sparsekit.training.moving_average import MovingAverage
    from sparsekit.training.narrow_model import NarrowModel

_HOME = {
    "Allocation": "sparsekit.allocation.base",
    "Bandit": "sparsekit.bandit",
    "Box": "sparsekit.bandit",
    "Budget": "sparsekit.measure.budget",
    "BudgetError": "sparsekit.measure.budget",
    "LossImportance": "sparsekit.training.loss_importance",
    "MovingAverage": "sparsekit.training.moving_average",
    "NarrowModel": "sparsekit.training.narrow_model",
    "Cost": "sparsekit.measure.cost",
    "Criterion": "sparsekit.criteria.base",
    "GradientImportance": "sparsekit.training.gradient_importance",
    "Interval": "sparsekit.bandit",
    "LayerRule": "sparsekit.layers",
    "LearnableMask": "sparsekit.training.learnable",
    "PUCBV": "sparsekit.bandit",
    "PruneReport": "sparsekit.pruning.report",
    "Pruned": "sparsekit.pruning.result",
    "Pull": "sparsekit.bandit",
    "SplitUCBV": "sparsekit.bandit",
    "UnitGraph": "sparsekit.graph.graph",
    "UnitGroup": "sparsekit.graph.groups",
    "UnitMask": "sparsekit.graph.mask",
    "UnitSlice": "sparsekit.graph.groups",
    "View": "sparsekit.criteria.base",
    "WeightMask": "sparsekit.graph.mask",
    "allocation": "sparsekit.allocation",
    "bandit": "sparsekit.bandit",
    "choose": "sparsekit.allocation.choose",
    "compensate": "sparsekit.finetuning",
    "compact": "sparsekit.surgery.compaction",
    "cost_model": "sparsekit.measure.model",
    "count_cost": "sparsekit.measure.cost",
    "criteria": "sparsekit.criteria",
    "errors": "sparsekit.errors",
    "expand": "sparsekit.surgery.compaction",
    "finetune": "sparsekit.finetuning",
    "fit_config": "sparsekit.surgery.pretrained_config",
    "finetuning": "sparsekit.finetuning",
    "layers": "sparsekit.layers",
    "load_compact": "sparsekit.surgery.saving",
    "load_mask": "sparsekit.surgery.saving",
    "prune": "sparsekit.pruning.prune",
    "recalibrate": "sparsekit.finetuning",
    "remap_optimizer": "sparsekit.surgery.optimizer_state",
    "save_compact": "sparsekit.surgery.saving",
    "select": "sparsekit.allocation.choose",
    "trace_units": "sparsekit.tracing.trace",
}

__all__ = [
    "PUCBV",
    "Allocation",
    "Bandit",
    "Box",
    "Budget",
    "BudgetError",
    "Cost",
    "Criterion",
    "GradientImportance",
    "Interval",
    "LayerRule",
    "LearnableMask",
    "LossImportance",
    "MovingAverage",
    "NarrowModel",
    "PruneReport",
    "Pruned",
    "Pull",
    "SplitUCBV",
    "UnitGraph",
    "UnitGroup",
    "UnitMask",
    "UnitSlice",
    "View",
    "WeightMask",
    "allocation",
    "bandit",
    "choose",
    "compact",
    "compensate",
    "cost_model",
    "count_cost",
    "criteria",
    "errors",
    "expand",
    "finetune",
    "finetuning",
    "fit_config",
    "layers",
    "load_compact",
    "load_mask",
    "prune",
    "recalibrate",
    "remap_optimizer",
    "save_compact",
    "select",
    "trace_units",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        return find_renamed("sparsekit", name, RENAMED)
    module = importlib.import_module(_HOME[name])
    return getattr(module, name, module)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
