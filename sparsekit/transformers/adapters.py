"""Rule for PEFT adapter layers. Sizes are taken from the wrapped layer, ranks from the matrices of the adapter."""

import math
import re
from typing import Any, ClassVar

from torch import nn

from sparsekit.layers import LayerRule, find_rule

_SIDES = (("in_features", "out_features"), ("num_embeddings", "embedding_dim"), ("in_channels", "out_channels"), ("nx", "nf"))
"""Possible attributes of a wrapped layer for its numbers of inputs and outputs."""


class AdapterRule(LayerRule):
    """Updates the sizes and ranks of PEFT adapter layers. PEFT uses them to add and merge adapters, not in forward."""

    type_names: ClassVar[tuple[str, ...]] = ("peft.tuners.tuners_utils.BaseTunerLayer",)
    sizes: ClassVar[frozenset[str]] = frozenset({"in_features", "out_features"})

    def resize(self, module: nn.Module) -> None:
        """Set sizes from the wrapped layer, and ranks from the matrices. The scale of an adapter does not change."""
        layer: Any = module
        base: Any = layer.get_base_layer()
        if (rule := find_rule(base)) is not None:
            rule.resize(base)
        sides = next((names for names in _SIDES if hasattr(base, names[0])), None)
        if sides is not None and hasattr(layer, "in_features"):
            layer.in_features, layer.out_features = (getattr(base, name) for name in sides)
        for name, rank in _ranks(layer).items():
            layer.r[name] = rank
            layer.lora_alpha[name] = layer.scaling[name] * (math.sqrt(rank) if layer.use_rslora.get(name) else rank)


def tell_ranks(model: Any) -> None:
    """Store pruned LoRA ranks and scales in `rank_pattern` and `alpha_pattern` of the model's PEFT configurations."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for path, layer in base.named_modules():
        for name, rank in _ranks(layer).items():
            config = model.peft_config[name]
            if rank != config.r or config.rank_pattern:
                # PEFT uses the first pattern that matches.
                config.rank_pattern = {re.escape(path): rank} | config.rank_pattern
                config.alpha_pattern = {re.escape(path): layer.lora_alpha[name]} | config.alpha_pattern


def _ranks(layer: Any) -> dict[str, int]:
    """Return adapter → rank of its matrices in a LoRA layer; empty for any other module."""
    found = {name: int(part.weight.shape[0]) for name, part in getattr(layer, "lora_A", {}).items()}
    found |= {name: int(part.shape[0]) for name, part in getattr(layer, "lora_embedding_A", {}).items()}
    return {name: rank for name, rank in found.items() if name in layer.r}
