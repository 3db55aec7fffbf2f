"""Passes of the dense model from a compact session: what dropped units would do is only seen there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sparsekit.masks.mask import UnitMask
from sparsekit.session import CompactSession
from sparsekit.units.graph import UnitGraph
from sparsekit.units.rules import resize

__all__ = ["GateProbe", "dense_skeleton", "straight_through_gates"]


def dense_skeleton(module: nn.Module, graph: UnitGraph) -> nn.Module:
    """A copy of a narrow module with the dense sizes and no memory: its entries must be given at each call."""
    skeleton = copy.deepcopy(module).to("meta")
    for name, shape in graph.shapes.items():
        owner_name, _, attribute = name.rpartition(".")
        owner = skeleton.get_submodule(owner_name)
        parameter, buffer = owner._parameters.get(attribute), owner._buffers.get(attribute)
        if parameter is not None:
            dense = torch.empty(shape, device="meta", dtype=parameter.dtype)
            owner._parameters[attribute] = nn.Parameter(dense, parameter.requires_grad)
        elif buffer is not None:
            owner._buffers[attribute] = torch.empty(shape, device="meta", dtype=buffer.dtype)
    resize(skeleton)
    return skeleton


def straight_through_gates(graph: UnitGraph, mask: UnitMask, scores: Tensor, explore: float) -> dict[str, Tensor]:
    """0 or 1 by the mask, with a straight-through gradient to the scores: (units,) for each group."""
    gates: dict[str, Tensor] = {}
    parts = torch.split(scores, [group.size for group in graph.groups.values()])
    for (name, keep), score in zip(mask.items(), parts, strict=True):
        hard = keep.to(score)
        gates[name] = hard + (hard + explore * (1.0 - hard)) * (score - score.detach())
    return gates


class GateProbe:
    """The gradient of every unit's gate, dropped ones included, by one pass of the dense model.

    Args:
        session: The narrow model; its sizes are looked at once, its state at each probe.
    """

    def __init__(self, session: CompactSession) -> None:
        self._session = session
        self._skeleton = dense_skeleton(session.module, session.graph)
        self._dtype = session.parameters()[0].dtype

    def gradient(self, loss: Callable[[Callable[..., Any]], Tensor]) -> Tensor:
        """∂L/∂gate at the present mask: float (J,). Nothing is trained and no statistics move.

        Args:
            loss: Gets the dense, gated model as a function of its inputs; returns the scalar loss.
        """
        session = self._session
        self._skeleton.train(session.module.training)
        state = session.dense_state()
        device = next(iter(state.values())).device
        gates = {name: keep.to(device, self._dtype).requires_grad_() for name, keep in session.mask.items()}

        def model(*inputs: Any) -> Any:
            return functional_call(self._skeleton, session.graph.gate(state, gates), inputs, tie_weights=False)

        with torch.enable_grad():
            return torch.cat(torch.autograd.grad(loss(model), list(gates.values())))
