"""Passes in train mode without what is random there: dropout says nothing about units."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from sparsekit._torch import DropoutNd, InstanceNorm


def train_without_dropout(model: nn.Module) -> nn.Module:
    """Put a private copy into train mode, but for dropout and instance norms.

    An instance norm keeps channels apart in both modes; in train mode it also writes its statistics by operators of its own.
    """
    model.train()
    for module in model.modules():
        if isinstance(module, DropoutNd | InstanceNorm):
            module.eval()
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0
    return model


class WithoutDropout(TorchFunctionMode):
    """Makes functional dropout, and that inside attention, do nothing, as in eval mode."""

    _FUNCTIONS = frozenset(
        getattr(home, name)
        for home in (torch, F)
        for name in dir(home)
        if name.rstrip("_123d").endswith("dropout") and not name.startswith(("_", "native"))
    )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._FUNCTIONS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {key: 0.0 if key == "dropout_p" else value for key, value in kwargs.items()}
        return func(*args, **kwargs)
