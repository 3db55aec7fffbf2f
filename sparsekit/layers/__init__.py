"""Layer rules: one file per family, found by the type of the module; and the names that a rule of a plug-in needs.

A rule is a `LayerRule`. The `trace` of an opaque layer gets the `Tracer` and describes the outputs with `TensorLabels`, one
`Labels` for each axis that carries units; its sources are `NOT_ZERO` or `ALWAYS_ZERO` where no gate matters.
"""

from functools import cache
from typing import Any

from torch import nn

from sparsekit._torch import ConvNd
from sparsekit.labels.tracer import Tracer
from sparsekit.labels.values import ALWAYS_ZERO, NOT_ZERO, Labels, TensorLabels
from sparsekit.layers.base import LayerRule, Rules, of_type
from sparsekit.registry import Registry

__all__ = ["ALWAYS_ZERO", "NOT_ZERO", "Labels", "LayerRule", "Rules", "TensorLabels", "Tracer", "find_rule"]
__all__ += ["is_convolution", "resize", "rules"]

rules = Registry(
    "layer rule",
    {
        "sized": "sparsekit.layers.sized:SizedRule",
        "instance-norm": "sparsekit.layers.sized:InstanceNormRule",
        "attention": "sparsekit.layers.attention:MultiheadAttentionRule",
        "transformer-encoder": "sparsekit.layers.attention:TransformerEncoderRule",
        "weight-norm": "sparsekit.layers.parametrized:WeightNormRule",
        "whole-weight": "sparsekit.layers.parametrized:WholeWeightRule",
        "router": "sparsekit.transformers.experts:RouterRule",
        "experts": "sparsekit.transformers.experts:ExpertsRule",
        "mamba2": "sparsekit.transformers.mamba:Mamba2Rule",
        "recurrent": "sparsekit.layers.recurrent:RecurrentRule",
    },
    group="sparsekit.rules",
)
"""Rule name → class. Other packages add theirs through the entry-point group `sparsekit.rules`."""


@cache
def _known() -> dict[type[nn.Module] | str, LayerRule]:
    made: list[LayerRule] = [rules[name]() for name in rules]
    found: dict[type[nn.Module] | str, LayerRule] = {}
    for rule in made:
        found |= dict.fromkeys(rule.types, rule) | dict.fromkeys(rule.type_names, rule)
    return found


def find_rule(module: nn.Module, extra: Rules | None = None) -> LayerRule | None:
    """Return the rule of the nearest type of `module`, or None. `extra`: type → rule, asked before the table."""
    table: dict[Any, LayerRule] = {**_known(), **(extra or {})}
    return of_type(module, table)


def resize(model: nn.Module, extra: Rules | None = None) -> None:
    """Set the sizes of every layer in `model` from the shapes of its parameters. `extra`: type → rule, asked first."""
    for module in model.modules():
        rule = find_rule(module, extra)
        if rule is not None:
            rule.resize(module)


def is_convolution(module: nn.Module) -> bool:
    """Tell whether a module is a convolution of torch over any number of axes, transposed ones too."""
    return isinstance(module, ConvNd)
