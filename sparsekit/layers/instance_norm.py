"""Instance norms, whose operators write statistics in ways of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import nn

from sparsekit._torch import InstanceNorm, buffers_of, channel_axis, parameters_of
from sparsekit.layers.labels.tracer import Tracer
from sparsekit.layers.labels.values import TensorLabels
from sparsekit.layers.sized import SizedRule


class InstanceNormRule(SizedRule):
    """Instance norms: each channel of each example by itself, so channels go as they do behind a batch norm."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (InstanceNorm,)
    type_names: ClassVar[tuple[str, ...]] = ()
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
            tracer.count(channel.nodes, tracer.module, "num_features")
        axes = [None if a is None or a.is_uniform or d > dim else a.without_zero() for d, a in enumerate(labels.axes)]
        tracer.set(out, TensorLabels(tuple(axes)))
        return out
