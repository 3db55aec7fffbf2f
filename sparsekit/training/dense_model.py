"""Passes of the dense model from a compact narrow_model: what dropped units would do is only seen there."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.graph.state import StateDict
from sparsekit.layers import resize
from sparsekit.surgery.kept_norms import KeptNorms
from sparsekit.surgery.rebuild import copy_with, named_entries
from sparsekit.surgery.sizes import set_sizes

__all__ = ["DenseModel", "dense_skeleton", "straight_through_gates"]


def dense_skeleton(module: nn.Module, graph: UnitGraph) -> nn.Module:
    """A copy of a narrow module with the dense sizes and no memory for its state, which must be given at each call.

    What is not in the state (a buffer that is not saved, a tensor in an attribute) is copied.
    """
    entries = named_entries(module)
    dense = {name: torch.empty(shape, device="meta", dtype=entries[name].dtype) for name, shape in graph.shapes.items()}
    skeleton = copy_with(module, dense)
    resize(skeleton)
    set_sizes(skeleton, graph, {group.name: group.size for group in graph.groups.values()})
    return skeleton


class DenseModel:
    """The dense model under a mask, as a function of its state.

    The state of a call stays in place until the next one, so that checkpointed parts, which run again in the backward
    pass, see the same gated entries; `torch.func.functional_call` would have put the module's own back by then.

    Args:
        module: Narrow or dense; copied, with the names of the model that was traced.
        graph: Its units.
    """

    def __init__(self, module: nn.Module, graph: UnitGraph) -> None:
        self._module = dense_skeleton(module, graph)
        self._norms = KeptNorms(self._module, graph)
        self._places: dict[str, tuple[nn.Module, str]] = {}
        modules = dict(self._module.named_modules(remove_duplicate=False))
        for name in graph.shapes:
            owner_name, _, attribute = name.rpartition(".")
            self._places[name] = modules[owner_name], attribute
        for owner, attribute in self._places.values():
            owner._parameters.pop(attribute, None)
            owner._buffers.pop(attribute, None)

    def __getstate__(self) -> dict[str, Any]:
        """Without the state of the last call, which belongs to a backward pass."""
        for owner, attribute in self._places.values():
            owner.__dict__.pop(attribute, None)
        self._refresh_recurrent()
        return vars(self)

    def _refresh_recurrent(self) -> None:
        """Recurrent layers keep a list of their weights."""
        for module in self._module.modules():
            if isinstance(module, nn.RNNBase):
                module._init_flat_weights()

    def call(self, state: StateDict, mask: UnitMask, like: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the model.

        Args:
            state: Dense, gated. Its buffers are written to, as in any forward pass.
            mask: What is kept, for norms that leave out the rest.
            like: The module whose training modes count.
            args: Positional arguments.
            kwargs: Keyword arguments.
        """
        for own, other in zip(self._module.modules(), like.modules(), strict=True):
            own.training = other.training
        for name, (owner, attribute) in self._places.items():
            owner.__dict__[attribute] = state[name]
        self._refresh_recurrent()
        self._norms.set_mask(mask)
        # A compiled module is compiled for its narrow sizes; the odd dense pass is not worth another compilation.
        compiled = "torch._dynamo" in sys.modules
        with torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
            return self._module(*args, **kwargs)


def straight_through_gates(graph: UnitGraph, mask: UnitMask, scores: Tensor, explore: float) -> dict[str, Tensor]:
    """0 or 1 by the mask, with a straight-through gradient to the scores: (units,) for each group."""
    gates: dict[str, Tensor] = {}
    parts = torch.split(scores, [group.size for group in graph.groups.values()])
    for name, score in zip(graph.groups, parts, strict=True):
        hard = mask[name].to(score)
        gates[name] = hard + (hard + explore * (1.0 - hard)) * (score - score.detach())
    return gates
