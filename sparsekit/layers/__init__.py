"""Layer rules: one file per family, found by the type of the module; and what a rule written outside needs.

A rule is a `LayerRule`. The `trace` of an opaque layer gets the `Tracer` and describes the outputs with `TensorLabels`, one
`Labels` for each axis that carries units; its sources are `NOT_ZERO` or `ALWAYS_ZERO` where no gate matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from torch import nn

from sparsekit.labels.tracer import Tracer
from sparsekit.labels.values import ALWAYS_ZERO, NOT_ZERO, Labels, TensorLabels
from sparsekit.layers.base import LayerRule
from sparsekit.registry import Registry

__all__ = [
    "ALWAYS_ZERO",
    "NOT_ZERO",
    "Labels",
    "LayerRule",
    "TensorLabels",
    "Tracer",
    "find_rule",
    "resize",
    "rules",
]

rules = Registry(
    "layer rule",
    {
        "linear": "sparsekit.layers.linear:LinearRule",
        "transposed-linear": "sparsekit.layers.transposed_linear:TransposedLinearRule",
        "bilinear": "sparsekit.layers.bilinear:BilinearRule",
        "prelu": "sparsekit.layers.linear:PReLURule",
        "conv": "sparsekit.layers.conv:ConvRule",
        "batch-norm": "sparsekit.layers.norm:BatchNormRule",
        "instance-norm": "sparsekit.layers.norm:InstanceNormRule",
        "group-norm": "sparsekit.layers.norm:GroupNormRule",
        "layer-norm": "sparsekit.layers.norm:LayerNormRule",
        "embedding": "sparsekit.layers.embedding:EmbeddingRule",
        "attention": "sparsekit.layers.attention:MultiheadAttentionRule",
        "transformer-encoder": "sparsekit.layers.attention:TransformerEncoderRule",
        "weight-norm": "sparsekit.layers.parametrised:WeightNormRule",
        "whole-weight": "sparsekit.layers.parametrised:WholeWeightRule",
        "recurrent": "sparsekit.layers.recurrent:RecurrentRule",
        "recurrent-cell": "sparsekit.layers.recurrent:CellRule",
    },
    group="sparsekit.rules",
)
"""Rule name → class. Other packages add theirs through the entry-point group `sparsekit.rules`."""


@cache
def _by_type() -> dict[type[nn.Module], LayerRule]:
    found: dict[type[nn.Module], LayerRule] = {}
    for name in rules:
        rule: LayerRule = rules[name]()
        found |= dict.fromkeys(rule.types, rule)
    return found


@cache
def _by_name() -> dict[str, LayerRule]:
    found: dict[str, LayerRule] = {}
    for name in rules:
        rule: LayerRule = rules[name]()
        found |= dict.fromkeys(rule.type_names, rule)
    return found


def find_rule(module: nn.Module, extra: Mapping[type[nn.Module], LayerRule] | None = None) -> LayerRule | None:
    """The rule of the nearest type of `module`, or None.

    Args:
        module: Any module.
        extra: Type → rule, asked before the table.
    """
    known = {**_by_type(), **(extra or {})}
    for kind in type(module).__mro__:
        if kind in known:
            return known[kind]
        if (name := f"{kind.__module__}.{kind.__qualname__}") in _by_name():
            return _by_name()[name]
    return None


def resize(model: nn.Module, extra: Mapping[type[nn.Module], LayerRule] | None = None) -> None:
    """Set the size attributes of every layer in `model` from the shapes of its parameters.

    Args:
        model: A model whose parameters have just been replaced by narrower or wider ones.
        extra: Type → rule, asked before the table.
    """
    for module in model.modules():
        rule = find_rule(module, extra)
        if rule is not None:
            rule.resize(module)
