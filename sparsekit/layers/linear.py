"""Linear, Bilinear and PReLU layers."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from sparsekit._torch import parameters_of
from sparsekit.layers.base import LayerRule
from sparsekit.layers.shapes import weight_shape

__all__ = ["LinearRule", "PReLURule"]


class LinearRule(LayerRule):
    """`nn.Linear`: rows make units, columns read them."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)

    def resize(self, module: nn.Module) -> None:
        """Set `out_features` and `in_features`."""
        shape = weight_shape(module)
        if shape is not None:
            module.out_features, module.in_features = shape  # type: ignore[assignment]


class PReLURule(LayerRule):
    """`nn.PReLU` with a slope per channel."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (nn.PReLU,)

    def resize(self, module: nn.Module) -> None:
        """Set `num_parameters`."""
        weight = parameters_of(module).get("weight")
        if weight is not None:
            module.num_parameters = weight.shape[0]  # type: ignore[assignment]
