"""Copies of a module with other tensors in place of its own: the base of compaction and of verification."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparsekit.errors import ForeignMaskError
from sparsekit.state import StateDict
from sparsekit.units.graph import UnitGraph
from sparsekit.units.rules import LayerRule, resize

__all__ = ["copy_with", "named_entries", "narrow_module", "narrow_state"]


def named_entries(model: nn.Module) -> dict[str, Tensor]:
    """State-dict key → the parameter or buffer itself (not a detached view); tied ones are the same object."""
    found: dict[str, Tensor] = {}
    keys = model.state_dict(keep_vars=True)
    for name, value in keys.items():
        if isinstance(value, Tensor):
            found[name] = value
    return found


def copy_with(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A deep copy of `model` in which some state entries are replaced; everything else is copied.

    The replaced tensors themselves are not copied, so this costs little where they are most of the model. Wherever the
    model refers to an entry (a second, tied name, a list of flat weights), the copy refers to the replacement.

    Args:
        model: Not changed.
        tensors: State-dict key → new tensor; of tied names the first one counts.

    Returns:
        The copy, with the `requires_grad` flags and training modes of the original.
    """
    memo: dict[int, object] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()  # deepcopy refuses tensors that have a history
    for name, own in named_entries(model).items():
        if name in tensors and id(own) not in memo:
            new = tensors[name].detach()
            memo[id(own)] = nn.Parameter(new, requires_grad=own.requires_grad) if isinstance(own, nn.Parameter) else new
    return copy.deepcopy(model, memo)


def narrow_state(state: StateDict, graph: UnitGraph, keep: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries that units touch, without the positions of dropped units; other keys are absent.

    Args:
        state: Dense entries; keys that units touch must be present.
        graph: Says what belongs to a unit.
        keep: Group name → bool (units,).
    """
    narrow: dict[str, Tensor] = {}
    done: dict[int, Tensor] = {}
    for name, axes in graph.kept_indices(keep).items():
        tensor = state[name]
        if id(tensor) not in done:
            piece = tensor.detach()
            for dim, index in sorted(axes.items()):
                if index.numel() < piece.shape[dim]:
                    piece = piece.index_select(dim, index.to(piece.device))
            done[id(tensor)] = piece.clone() if piece.data_ptr() == tensor.data_ptr() else piece
        narrow[name] = done[id(tensor)]
    return narrow


def narrow_module(
    model: nn.Module, graph: UnitGraph, keep: Mapping[str, Tensor], rules: Mapping[type[nn.Module], LayerRule] | None = None
) -> nn.Module:
    """A copy of `model` without the dropped units, its size attributes set.

    Raises:
        ForeignMaskError: an entry of the copy does not have the shape that the graph expects.
    """
    small = copy_with(model, narrow_state(named_entries(model), graph, keep))
    resize(small, rules)
    entries = named_entries(small)
    indices = graph.kept_indices(keep)
    # A fused kernel that is handed wrong shapes reads past its buffers, so nothing is left to chance here.
    for name, dense in graph.shapes.items():
        axes = indices.get(name, {})
        expected = torch.Size(len(axes[d]) if d in axes else size for d, size in enumerate(dense))
        if name not in entries or entries[name].shape != expected:
            found = tuple(entries[name].shape) if name in entries else "nothing"
            raise ForeignMaskError(
                f"after compaction {name!r} has shape {found}, expected {tuple(expected)};"
                " the model is not the one that the graph was traced from"
            )
    return small
