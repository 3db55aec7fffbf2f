"""Layers whose operators say which units go together, so that only their sizes are to be set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from sparsekit._torch import ConvNd, NormBase, buffers_of
from sparsekit.layers.base import LayerRule
from sparsekit.layers.shapes import weight_shape

_SIZES: Mapping[type[nn.Module] | str, Mapping[str, int | None]] = {
    nn.Linear: {"out_features": 0, "in_features": 1},
    nn.Embedding: {"embedding_dim": 1},
    nn.EmbeddingBag: {"embedding_dim": 1},
    nn.PReLU: {"num_parameters": 0},
    NormBase: {"num_features": 0},
    nn.LayerNorm: {"normalized_shape": None},
    nn.RMSNorm: {"normalized_shape": None},
    "transformers.pytorch_utils.Conv1D": {"nx": 0, "nf": 1},
}
"""Type, or its name for packages that may not be installed → attribute → the axis of the weight that it counts, or None for
the whole shape."""


class SizedRule(LayerRule):
    """Linear layers, embeddings, slopes per channel, batch norms and layer norms: a table says what their sizes are."""

    types: ClassVar[tuple[type[nn.Module], ...]] = tuple(kind for kind in _SIZES if isinstance(kind, type))
    type_names: ClassVar[tuple[str, ...]] = tuple(kind for kind in _SIZES if isinstance(kind, str))

    def resize(self, module: nn.Module) -> None:
        """Set the sizes; a norm without any tensor keeps its number, which its forward does not read."""
        shape = weight_shape(module)
        if shape is None and (mean := buffers_of(module).get("running_mean")) is not None:
            shape = mean.shape
        names = (name for kind in type(module).__mro__ for name in (kind, f"{kind.__module__}.{kind.__qualname__}"))
        sizes = next((_SIZES[name] for name in names if name in _SIZES), {})
        if shape is not None:
            for attribute, axis in sizes.items():
                setattr(module, attribute, tuple(shape) if axis is None else shape[axis])


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


class GroupNormRule(LayerRule):
    """Group norm: the unit is a whole norm group, so the number of groups shrinks and their width stays."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (nn.GroupNorm,)

    def resize(self, module: nn.Module) -> None:
        """Set `num_channels` and `num_groups`. A single group over all channels stays one."""
        assert isinstance(module, nn.GroupNorm)
        shape = weight_shape(module)
        if shape is not None:
            width = module.num_channels // module.num_groups
            module.num_groups = 1 if module.num_groups == 1 else shape[0] // width
            module.num_channels = shape[0]
