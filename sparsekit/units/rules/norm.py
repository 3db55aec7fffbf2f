"""Batch, instance, group and layer norms."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from sparsekit.units.rules.base import LayerRule

__all__ = ["BatchNormRule", "GroupNormRule", "LayerNormRule"]


class BatchNormRule(LayerRule):
    """Batch and instance norms: scale, shift and running statistics go with their channel."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (_NormBase,)

    def resize(self, module: nn.Module) -> None:
        """Set `num_features`; a norm without any tensor keeps its number, which its forward does not read."""
        assert isinstance(module, _NormBase)
        weight = module._parameters.get("weight")
        known = weight if weight is not None else module._buffers.get("running_mean")
        if known is not None:
            module.num_features = known.shape[0]


class GroupNormRule(LayerRule):
    """Group norm: the unit is a whole norm group, so the number of groups shrinks and their width stays."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (nn.GroupNorm,)

    def resize(self, module: nn.Module) -> None:
        """Set `num_channels` and `num_groups`."""
        assert isinstance(module, nn.GroupNorm)
        weight = module._parameters.get("weight")
        if weight is not None:
            width = module.num_channels // module.num_groups
            module.num_channels, module.num_groups = weight.shape[0], weight.shape[0] // width


class LayerNormRule(LayerRule):
    """Layer norm and RMS norm over their last axes: the units on these stay whole."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (nn.LayerNorm, nn.RMSNorm)

    def resize(self, module: nn.Module) -> None:
        """Set `normalized_shape`."""
        weight = module._parameters.get("weight")
        if weight is not None:
            module.normalized_shape = tuple(weight.shape)  # type: ignore[assignment]
