"""sparsekit: structured pruning for PyTorch that verifies every removal, and training of narrow networks.

The public names are listed in `__all__`; anything else may change. Names are imported when first used, so that
`sparsekit.bandit` needs only numpy.
"""

# ruff: noqa: I001 - one line for each home

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsekit.lazy import lazy_names
from sparsekit.version import __version__ as __version__

if TYPE_CHECKING:
    from sparsekit import allocation as allocation, bandit as bandit, criteria as criteria, errors as errors
    from sparsekit import finetuning as finetuning, graph as graph, layers as layers, measure as measure
    from sparsekit import surgery as surgery, tracing as tracing, training as training
    from sparsekit.allocation import Allocation as Allocation, mask_from_scores as mask_from_scores
    from sparsekit.criteria import Criterion as Criterion, ScoringContext as ScoringContext
    from sparsekit.finetuning import Distillation as Distillation, finetune as finetune, reconstruct as reconstruct
    from sparsekit.finetuning import recalibrate_batchnorm as recalibrate_batchnorm
    from sparsekit.graph import UnitGraph as UnitGraph, UnitGroup as UnitGroup, UnitSlice as UnitSlice
    from sparsekit.graph import UnitMask as UnitMask, WeightMask as WeightMask
    from sparsekit.layers import LayerRule as LayerRule
    from sparsekit.measure import Budget as Budget, BudgetError as BudgetError, Cost as Cost
    from sparsekit.measure import cost_model as cost_model, count_cost as count_cost
    from sparsekit.pruning.folder import prune_folder as prune_folder
    from sparsekit.pruning.prune import plan as plan, prune as prune
    from sparsekit.pruning.report import PruneReport as PruneReport
    from sparsekit.pruning.result import Pruned as Pruned
    from sparsekit.surgery import compact as compact, expand as expand, export_onnx as export_onnx
    from sparsekit.surgery import load_compact as load_compact, load_mask as load_mask, save_compact as save_compact
    from sparsekit.tracing import trace_units as trace_units
    from sparsekit.training import GradientImportance as GradientImportance, LearnableMask as LearnableMask
    from sparsekit.training import LearnedNarrowing as LearnedNarrowing, NarrowModel as NarrowModel
    from sparsekit.transformers.gguf import export_gguf as export_gguf
    from sparsekit.transformers.pretrained import fit_config as fit_config
    from sparsekit.transformers.pretrained import load_pretrained as load_pretrained, save_pretrained as save_pretrained

_HOMES = {
    "sparsekit": "allocation bandit criteria errors",
    "sparsekit.finetuning": "finetune recalibrate_batchnorm reconstruct Distillation",
    "sparsekit.graph": "UnitGraph UnitMask",
    "sparsekit.measure": "Budget count_cost",
    "sparsekit.pruning.folder": "prune_folder",
    "sparsekit.pruning.prune": "plan prune",
    "sparsekit.pruning.result": "Pruned",
    "sparsekit.surgery": "compact expand export_onnx load_compact save_compact",
    "sparsekit.tracing": "trace_units",
    "sparsekit.training": "LearnableMask LearnedNarrowing",
    "sparsekit.transformers.gguf": "export_gguf",
    "sparsekit.transformers.pretrained": "load_pretrained save_pretrained",
}
"""Module → names that scripts can rely on."""
_FURTHER = {
    "sparsekit": "finetuning graph layers measure surgery tracing training",
    "sparsekit.allocation": "Allocation mask_from_scores",
    "sparsekit.criteria": "Criterion ScoringContext",
    "sparsekit.graph": "UnitGroup UnitSlice WeightMask",
    "sparsekit.layers": "LayerRule",
    "sparsekit.measure": "BudgetError Cost cost_model",
    "sparsekit.pruning.report": "PruneReport",
    "sparsekit.surgery": "load_mask",
    "sparsekit.training": "GradientImportance NarrowModel",
    "sparsekit.transformers.pretrained": "fit_config",
}
"""Module → names for plug-ins and for sparsekit itself, which may change."""
__all__, __getattr__ = lazy_names(__name__, _HOMES, _FURTHER)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
