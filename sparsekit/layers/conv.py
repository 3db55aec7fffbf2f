"""Convolutions of 1, 2 and 3 dimensions, transposed, grouped and depthwise."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from sparsekit._torch import ConvNd
from sparsekit.layers.base import LayerRule
from sparsekit.layers.shapes import weight_shape

__all__ = ["ConvRule"]


class ConvRule(LayerRule):
    """Filters make channels. Depthwise layers lose whole conv groups, other grouped layers the same position of each."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (ConvNd,)

    def resize(self, module: nn.Module) -> None:
        """Set `out_channels`, `in_channels` and `groups`."""
        assert isinstance(module, ConvNd)
        shape = weight_shape(module)
        if shape is None:
            return
        if module.groups > 1 and module.in_channels == module.groups:
            multiplier = module.out_channels // module.groups
            module.groups = shape[0] if module.transposed else shape[0] // multiplier
            module.in_channels, module.out_channels = module.groups, module.groups * multiplier
        elif module.transposed:
            module.in_channels, module.out_channels = shape[0], shape[1] * module.groups
        else:
            module.in_channels, module.out_channels = shape[1] * module.groups, shape[0]
