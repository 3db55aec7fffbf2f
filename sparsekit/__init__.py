"""sparsekit: structured pruning for PyTorch that verifies every cut, and training of narrow networks.

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
        graph as graph,
        layers as layers,
        measure as measure,
        surgery as surgery,
        tracing as tracing,
        training as training,
    )
    from sparsekit.allocation.shares import mask_from_scores as mask_from_scores, make_mask as make_mask
    from sparsekit.allocation.problem import Allocation as Allocation
    from sparsekit.bandit import (
        PUCBV as PUCBV,
        Bandit as Bandit,
        Box as Box,
        Interval as Interval,
        Pull as Pull,
        SplitUCBV as SplitUCBV,
    )
    from sparsekit.criteria.base import Criterion as Criterion, ScoringContext as ScoringContext
    from sparsekit.finetuning import (
        Distillation as Distillation,
        finetune as finetune,
        recalibrate_batchnorm as recalibrate_batchnorm,
        reconstruct as reconstruct,
    )
    from sparsekit.graph.graph import UnitGraph as UnitGraph
    from sparsekit.graph.groups import UnitGroup as UnitGroup, UnitSlice as UnitSlice
    from sparsekit.graph.mask import UnitMask as UnitMask, WeightMask as WeightMask
    from sparsekit.layers import LayerRule as LayerRule
    from sparsekit.measure.budget import Budget as Budget, BudgetError as BudgetError
    from sparsekit.measure.cost import Cost as Cost, count_cost as count_cost
    from sparsekit.measure.cost import cost_model as cost_model
    from sparsekit.pruning.prune import prune as prune
    from sparsekit.pruning.report import PruneReport as PruneReport
    from sparsekit.pruning.result import Pruned as Pruned, PrunePlan as PrunePlan
    from sparsekit.surgery.compaction import compact as compact, expand as expand
    from sparsekit.surgery.onnx import export_onnx as export_onnx
    from sparsekit.transformers.pretrained import fit_config as fit_config
    from sparsekit.transformers.pretrained import load_pretrained as load_pretrained, save_pretrained as save_pretrained
    from sparsekit.surgery.saving import load_compact as load_compact, load_mask as load_mask, save_compact as save_compact
    from sparsekit.tracing.trace import trace_units as trace_units
    from sparsekit.training.importance import GradientImportance as GradientImportance
    from sparsekit.training.learnable import LearnableMask as LearnableMask
    from sparsekit.training.narrow_model import NarrowModel as NarrowModel
    from sparsekit.training.narrowing import LearnedNarrowing as LearnedNarrowing

_HOMES = {
    "sparsekit": "allocation criteria errors",
    "sparsekit.allocation.shares": "make_mask",
    "sparsekit.bandit": "PUCBV Box Interval SplitUCBV",
    "sparsekit.finetuning": "finetune recalibrate_batchnorm reconstruct Distillation",
    "sparsekit.graph.graph": "UnitGraph",
    "sparsekit.graph.mask": "UnitMask",
    "sparsekit.measure.budget": "Budget",
    "sparsekit.measure.cost": "count_cost",
    "sparsekit.pruning.prune": "prune",
    "sparsekit.pruning.result": "Pruned PrunePlan",
    "sparsekit.surgery.compaction": "compact expand",
    "sparsekit.transformers.pretrained": "load_pretrained save_pretrained",
    "sparsekit.surgery.saving": "load_compact save_compact",
    "sparsekit.tracing.trace": "trace_units",
    "sparsekit.training.learnable": "LearnableMask",
    "sparsekit.training.narrowing": "LearnedNarrowing",
    "sparsekit.surgery.onnx": "export_onnx",
}
"""What a script can rely on."""
_FURTHER = {
    "sparsekit": "bandit finetuning graph layers measure surgery tracing training",
    "sparsekit.allocation.shares": "mask_from_scores",
    "sparsekit.allocation.problem": "Allocation",
    "sparsekit.bandit": "Bandit Pull",
    "sparsekit.criteria.base": "Criterion ScoringContext",
    "sparsekit.graph.groups": "UnitGroup UnitSlice",
    "sparsekit.graph.mask": "WeightMask",
    "sparsekit.layers": "LayerRule",
    "sparsekit.measure.budget": "BudgetError",
    "sparsekit.measure.cost": "Cost cost_model",
    "sparsekit.pruning.report": "PruneReport",
    "sparsekit.transformers.pretrained": "fit_config",
    "sparsekit.surgery.saving": "load_mask",
    "sparsekit.training.importance": "GradientImportance",
    "sparsekit.training.narrow_model": "NarrowModel",
}
"""For authors of plug-ins, and for sparsekit itself; these names may change."""
__all__, __getattr__ = lazy_names(__name__, _HOMES, _FURTHER)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
