"""GateProbe: the gradient of every unit's gate, measured by one pass of the dense model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsekit.training.dense_model import DenseModel
from sparsekit.training.narrow_model import NarrowModel

__all__ = ["GateProbe"]


class GateProbe:
    """The gradient of every unit's gate, dropped ones included, by one pass of the dense model.

    Args:
        narrow_model: The narrow model; its sizes are looked at once, its state at each probe.
    """

    def __init__(self, narrow_model: NarrowModel) -> None:
        self._narrow_model = narrow_model
        self._dense = DenseModel(narrow_model.module, narrow_model.graph)
        self._dtype = narrow_model.parameters()[0].dtype

    def gradient(self, loss: Callable[[Callable[..., Any]], Tensor]) -> Tensor:
        """∂L/∂gate at the present mask: float (J,). Nothing is trained and no statistics move.

        Args:
            loss: Gets the dense, gated model as a function of its inputs; returns the scalar loss.
        """
        narrow_model = self._narrow_model
        state = narrow_model.dense_state()
        device = next(iter(state.values())).device
        mask = narrow_model.mask
        gates = {name: mask[name].to(device, self._dtype).requires_grad_() for name in narrow_model.graph.groups}

        def model(*inputs: Any) -> Any:
            return self._dense.call(narrow_model.graph.gate(state, gates), mask, narrow_model.module, inputs, {})

        with torch.enable_grad():
            return torch.cat(torch.autograd.grad(loss(model), list(gates.values())))
