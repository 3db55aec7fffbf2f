"""Linear layers that keep their weight as (inputs, outputs): `Conv1D` of Hugging Face's GPT-2."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from sparsekit._torch import parameters_of
from sparsekit.layers.base import LayerRule

__all__ = ["TransposedLinearRule"]


class TransposedLinearRule(LayerRule):
    """`transformers.pytorch_utils.Conv1D`: columns make units, rows read them."""

    type_names: ClassVar[tuple[str, ...]] = ("transformers.pytorch_utils.Conv1D",)

    def resize(self, module: nn.Module) -> None:
        """Set `nx` and `nf`."""
        weight = parameters_of(module).get("weight")
        if weight is not None:
            module.nx, module.nf = weight.shape  # type: ignore[assignment]
