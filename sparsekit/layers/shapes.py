"""Shapes of a layer's weights, also where the weight itself is computed from other parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrize

from sparsekit._torch import buffers_of, parameters_of


def weight_shape(module: nn.Module) -> torch.Size | None:
    """The shape of the weight, or None if the module has none.

    Args:
        module: A layer whose parameters may have just been replaced by narrower ones. If its weight is parametrised, or
            computed by a hook, the shape is that of the parameter it is computed from: the direction of a normed weight, the
            weight before it was masked or divided.
    """
    known = parameters_of(module).get("weight")
    if known is not None:
        return known.shape
    for suffix in ("_v", "_orig"):  # torch.nn.utils.weight_norm; torch.nn.utils.spectral_norm and prune
        if (own := parameters_of(module).get(f"weight{suffix}")) is not None:
            return own.shape
    if parametrize.is_parametrized(module, "weight"):
        chain = module.get_submodule("parametrizations.weight")
        # The last one: `original`, or of a normed weight `original1`, its direction.
        for tensor in [*list(parameters_of(chain).values())[-1:], *list(buffers_of(chain).values())[-1:]]:
            if tensor is not None and tensor.dim() > 0:
                return tensor.shape
    return None
