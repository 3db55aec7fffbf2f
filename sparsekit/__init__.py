"""sparsekit: structured sparsity that is learned while a network trains.

The public names are listed in `__all__`; anything else may change. Names are imported when first used, so that
`sparsekit.bandit` needs numpy alone.
"""

# ruff: noqa: I001 - one line for each home

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsekit.lazy import lazy_names
from sparsekit.version import __version__ as __version__

if TYPE_CHECKING:
    from sparsekit import (
        allocation as allocation,
        bandit as bandit,
        criteria as criteria,
        errors as errors,
        finetuning as finetuning,
        foreach as foreach,
        graph as graph,
        layers as layers,
        measure as measure,
        surgery as surgery,
        tracing as tracing,
        training as training,
    )
    from sparsekit.allocation.base import Allocation as Allocation
    from sparsekit.allocation.choose import choose as choose, select as select
    from sparsekit.bandit import (
        PUCBV as PUCBV,
        Bandit as Bandit,
        Box as Box,
        Interval as Interval,
        Pull as Pull,
        SplitUCBV as SplitUCBV,
    )
    from sparsekit.criteria.base import Criterion as Criterion, View as View
    from sparsekit.finetuning import compensate as compensate, finetune as finetune, recalibrate as recalibrate
    from sparsekit.graph.graph import UnitGraph as UnitGraph
    from sparsekit.graph.groups import UnitGroup as UnitGroup, UnitSlice as UnitSlice
    from sparsekit.graph.mask import UnitMask as UnitMask, WeightMask as WeightMask
    from sparsekit.layers import LayerRule as LayerRule
    from sparsekit.measure.budget import Budget as Budget, BudgetError as BudgetError
    from sparsekit.measure.cost import Cost as Cost, count_cost as count_cost
    from sparsekit.measure.model import cost_model as cost_model
    from sparsekit.pruning.prune import prune as prune
    from sparsekit.pruning.report import PruneReport as PruneReport
    from sparsekit.pruning.result import Pruned as Pruned
    from sparsekit.surgery.compaction import compact as compact, expand as expand
    from sparsekit.surgery.optimizer_state import remap_optimizer as remap_optimizer
    from sparsekit.surgery.pretrained_config import fit_config as fit_config
    from sparsekit.surgery.saving import load_compact as load_compact, load_mask as load_mask, save_compact as save_compact
    from sparsekit.tracing.trace import trace_units as trace_units
    from sparsekit.training.gradient_importance import GradientImportance as GradientImportance
    from sparsekit.training.learnable import LearnableMask as LearnableMask
    from sparsekit.training.loss_importance import LossImportance as LossImportance
    from sparsekit.training.moving_average import MovingAverage as MovingAverage
    from sparsekit.training.narrow_model import NarrowModel as NarrowModel

_NAMES = {
    "sparsekit": "allocation bandit criteria errors finetuning foreach graph layers measure surgery tracing training",
    "sparsekit.allocation.base": "Allocation",
    "sparsekit.allocation.choose": "choose select",
    "sparsekit.bandit": "Bandit Box Interval PUCBV Pull SplitUCBV",
    "sparsekit.criteria.base": "Criterion View",
    "sparsekit.finetuning": "compensate finetune recalibrate",
    "sparsekit.graph.graph": "UnitGraph",
    "sparsekit.graph.groups": "UnitGroup UnitSlice",
    "sparsekit.graph.mask": "UnitMask WeightMask",
    "sparsekit.layers": "LayerRule",
    "sparsekit.measure.budget": "Budget BudgetError",
    "sparsekit.measure.cost": "Cost count_cost",
    "sparsekit.measure.model": "cost_model",
    "sparsekit.pruning.prune": "prune",
    "sparsekit.pruning.report": "PruneReport",
    "sparsekit.pruning.result": "Pruned",
    "sparsekit.surgery.compaction": "compact expand",
    "sparsekit.surgery.optimizer_state": "remap_optimizer",
    "sparsekit.surgery.pretrained_config": "fit_config",
    "sparsekit.surgery.saving": "load_compact load_mask save_compact",
    "sparsekit.tracing.trace": "trace_units",
    "sparsekit.training.gradient_importance": "GradientImportance",
    "sparsekit.training.learnable": "LearnableMask",
    "sparsekit.training.loss_importance": "LossImportance",
    "sparsekit.training.moving_average": "MovingAverage",
    "sparsekit.training.narrow_model": "NarrowModel",
}
"""Module → the public names that are imported from it when they are first used; type checkers read those above."""
__all__, __getattr__ = lazy_names(__name__, _NAMES)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
