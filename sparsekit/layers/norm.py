"""Batch, instance, group and layer norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import nn

from sparsekit._torch import InstanceNorm, NormBase, buffers_of, channel_axis, parameters_of
from sparsekit.labels.tracer import Tracer
from sparsekit.labels.values import TensorLabels
from sparsekit.layers.base import LayerRule

__all__ = ["BatchNormRule", "GroupNormRule", "InstanceNormRule", "LayerNormRule"]


class BatchNormRule(LayerRule):
    """Batch and instance norms: scale, shift and running statistics go with their channel."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (NormBase,)

    def resize(self, module: nn.Module) -> None:
        """Set `num_features`; a norm without any tensor keeps its number, which its forward does not read."""
        assert isinstance(module, NormBase)
        weight = parameters_of(module).get("weight")
        known = weight if weight is not None else buffers_of(module).get("running_mean")
        if known is not None:
            module.num_features = known.shape[0]


class InstanceNormRule(BatchNormRule):
    """Instance norms: each channel of each example by itself, so channels go as they do behind a batch norm."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (InstanceNorm,)
    opaque: ClassVar[bool] = True

    def trace(
        self, tracer: Tracer, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Unite the channels with scale, shift and statistics; without any, the number of channels must be noted."""
        assert isinstance(module, InstanceNorm)
        out = run(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        labels = tracer.labels(x)
        own = [
            tracer.labels(t)
            for t in (*parameters_of(module).values(), *buffers_of(module).values())
            if t is not None and t.dim()
        ]
        dim = channel_axis(module, x.dim())
        channel = labels.axes[dim]
        for other, axis in enumerate(labels.axes):
            if other > dim:
                tracer.fix(axis, "normalised by an instance norm across an axis of units")
        if channel is None or channel.is_uniform:
            for entry in own:
                tracer.fix(entry, "follows values that belong to no unit", quiet=True)
            return out
        for entry in own:
            if (axis := entry.axes[0]) is not None:
                tracer.unite(channel.nodes, axis.nodes)
                tracer.make(entry, 0)
        if not own:
            tracer.count(channel.nodes, tracer.module, "num_features", needed=False)
        axes = [None if a is None or a.is_uniform or d > dim else a.without_zero() for d, a in enumerate(labels.axes)]
        tracer.set(out, TensorLabels(tuple(axes)))
        return out


class GroupNormRule(LayerRule):
    """Group norm: the unit is a whole norm group, so the number of groups shrinks and their width stays."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (nn.GroupNorm,)

    def resize(self, module: nn.Module) -> None:
        """Set `num_channels` and `num_groups`."""
        assert isinstance(module, nn.GroupNorm)
        weight = parameters_of(module).get("weight")
        if weight is not None:
            # A single group over all channels stays one; of several, whole groups went.
            width = module.num_channels // module.num_groups
            module.num_groups = 1 if module.num_groups == 1 else weight.shape[0] // width
            module.num_channels = weight.shape[0]


class LayerNormRule(LayerRule):
    """Layer norm and RMS norm over their last axes: the units on these stay whole."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (nn.LayerNorm, nn.RMSNorm)

    def resize(self, module: nn.Module) -> None:
        """Set `normalized_shape`."""
        weight = parameters_of(module).get("weight")
        if weight is not None:
            module.normalized_shape = tuple(weight.shape)  # type: ignore[assignment]
