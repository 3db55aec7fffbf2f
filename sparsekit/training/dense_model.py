"""DenseModel: passes of a wider model while its narrow copy trains: only there have dropped units an effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit._torch import buffers_of, eager, parameters_of, reset_flat_weights
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import narrow_shape
from sparsekit.graph.mask import UnitMask
from sparsekit.graph.state import StateDict
from sparsekit.layers import resize
from sparsekit.surgery.kept_norms import KeptNorms
from sparsekit.surgery.rebuild import copy_with, named_entries, set_sizes


def skeleton(module: nn.Module, graph: UnitGraph, wide: UnitMask) -> nn.Module:
    """Copy a narrow module with the sizes under another mask, but without memory for its state, which each call must bring.

    Tensors outside the state (a buffer that is not saved, a tensor in an attribute) are copied.

    Args:
        module: Narrow or dense.
        graph: Its units.
        wide: The mask.
    """
    entries = named_entries(module)
    axes = graph.kept_indices(wide)
    shapes = {name: narrow_shape(shape, axes.get(name, {})) for name, shape in graph.shapes.items()}
    empty = {name: torch.empty(shape, device="meta", dtype=entries[name].dtype) for name, shape in shapes.items()}
    found = copy_with(module, empty)
    resize(found)
    set_sizes(found, graph, wide.counts())
    return found


class DenseModel:
    """The model at the sizes of a wider mask, as a function of its state.

    The state of a call stays in place until the next call, so that checkpointed parts, which run again in the backward
    pass, see the same gated entries. `torch.func.functional_call` restores the module's own state too early for that.

    Args:
        module: Narrow or dense; copied, with the names of the model that was traced.
        graph: Its units.
        wide: Says the sizes; all masks of a call are within masks of these sizes.
    """

    def __init__(self, module: nn.Module, graph: UnitGraph, wide: UnitMask) -> None:
        self._module = skeleton(module, graph, wide)
        self._norms = KeptNorms(self._module, graph)
        self._places: dict[str, tuple[nn.Module, str]] = {}
        modules = dict(self._module.named_modules(remove_duplicate=False))
        for name in graph.shapes:
            owner_name, _, attribute = name.rpartition(".")
            self._places[name] = modules[owner_name], attribute
        for owner, attribute in self._places.values():
            parameters_of(owner).pop(attribute, None)
            buffers_of(owner).pop(attribute, None)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the state of the last call, which belongs to a backward pass."""
        for owner, attribute in self._places.values():
            owner.__dict__.pop(attribute, None)
        self._sync_recurrent()
        return vars(self)

    def _sync_recurrent(self) -> None:
        """Renew the list of weights that every recurrent layer keeps."""
        for module in self._module.modules():
            if isinstance(module, nn.RNNBase):
                reset_flat_weights(module)

    def call(
        self,
        state: StateDict,
        mask: UnitMask,
        like: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        within: UnitMask | None = None,
    ) -> Any:
        """Run the model.

        Args:
            state: Dense or wide, gated. Its buffers are written to, as in any forward pass.
            mask: What is kept, for norms that leave out the rest.
            like: A module of the same structure; its training modes are used.
            args: Positional arguments.
            kwargs: Keyword arguments.
            within: The units that a wide state has, of the sizes of `wide`.
        """
        for own, other in zip(self._module.modules(), like.modules(), strict=True):
            own.training = other.training
        for name, (owner, attribute) in self._places.items():
            owner.__dict__[attribute] = state[name]
        self._sync_recurrent()
        self._norms.set_mask(mask, within, device=next(iter(state.values())).device)
        # A compiled module is compiled for its narrow sizes; a rare dense pass is not worth another compilation.
        with eager():
            return self._module(*args, **kwargs)


def straight_through_gates(graph: UnitGraph, mask: UnitMask, scores: Tensor, explore: float) -> dict[str, Tensor]:
    """Return gates of 0 or 1 by the mask, with a straight-through gradient to the scores: group name → (units,)."""
    gates: dict[str, Tensor] = {}
    parts = torch.split(scores, [group.size for group in graph.groups.values()])
    for name, score in zip(graph.groups, parts, strict=True):
        hard = mask[name].to(score)
        gates[name] = hard + (hard + explore * (1.0 - hard)) * (score - score.detach())
    return gates
