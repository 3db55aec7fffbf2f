"""Convolutions of 1, 2 and 3 dimensions, transposed, grouped and depthwise."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from torch.nn.modules.conv import _ConvNd

from sparsekit.units.rules.base import LayerRule

__all__ = ["ConvRule"]


class ConvRule(LayerRule):
    """Filters make channels. Depthwise layers lose whole conv groups, other grouped layers the same position of each."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (_ConvNd,)

    def resize(self, module: nn.Module) -> None:
        """Set `out_channels`, `in_channels` and `groups`."""
        assert isinstance(module, _ConvNd)
        weight = module._parameters.get("weight")
        if weight is None:
            return
        if module.groups > 1 and module.in_channels == module.groups:
            multiplier = module.out_channels // module.groups
            module.groups = weight.shape[0] if module.transposed else weight.shape[0] // multiplier
            module.in_channels, module.out_channels = module.groups, module.groups * multiplier
        elif module.transposed:
            module.in_channels, module.out_channels = weight.shape[0], weight.shape[1] * module.groups
        else:
            module.in_channels, module.out_channels = weight.shape[1] * module.groups, weight.shape[0]
