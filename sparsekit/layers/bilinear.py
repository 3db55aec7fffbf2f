"""Bilinear layers: an axis of the weight for each input, and one for the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import nn

from sparsekit.labels.tracer import Tracer
from sparsekit.labels.values import TensorLabels
from sparsekit.layers.base import LayerRule
from sparsekit.layers.shapes import weight_shape

__all__ = ["BilinearRule"]


class BilinearRule(LayerRule):
    """`nn.Bilinear`, whose operator multiplies three tensors at once."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (nn.Bilinear,)
    opaque: ClassVar[bool] = True

    def resize(self, module: nn.Module) -> None:
        """Set `out_features`, `in1_features` and `in2_features`."""
        assert isinstance(module, nn.Bilinear)
        shape = weight_shape(module)
        if shape is not None:
            module.out_features, module.in1_features, module.in2_features = shape

    def trace(
        self, tracer: Tracer, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Unite the last axis of each input with its axis of the weight."""
        assert isinstance(module, nn.Bilinear)
        out = run(*args, **kwargs)
        given = dict(zip(("input1", "input2"), args, strict=False)) | dict(kwargs)
        weight = tracer.labels(module.weight)
        inputs = [tracer.labels(given[name], *range(given[name].dim() - 1)) for name in ("input1", "input2")]
        if weight.entry is None:
            for labels in (weight, *inputs):
                tracer.fix(labels, "a bilinear layer with computed weights keeps its units")
            return out
        for dim, labels in enumerate(inputs, start=1):
            for axis in labels.axes[:-1]:
                tracer.fix(axis, "an axis of units runs through a bilinear layer as batch")
            tracer.contract(TensorLabels(labels.axes[-1:]), 0, weight, dim)
        tracer.make(weight, 0)
        rows, bias = weight.axes[0], None if module.bias is None else tracer.labels(module.bias)
        if rows is not None and bias is not None and bias.axes[0] is not None:
            tracer.unite(rows.nodes, bias.axes[0].nodes)
            tracer.make(bias, 0)
            rows = type(rows)(rows.nodes, tracer.store.both(rows.sources, bias.axes[0].sources))
        tracer.set(out, TensorLabels((*([None] * (out.dim() - 1)), rows)))
        return out
