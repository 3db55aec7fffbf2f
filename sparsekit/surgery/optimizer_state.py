"""remap_optimizer(): a live optimiser follows a model from one mask to another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsekit.errors import ForeignMaskError, InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.graph.state import StateDict
from sparsekit.surgery.compaction import scatter
from sparsekit.surgery.rebuild import gather, named_entries
from sparsekit.training.narrow_model import first_value

__all__ = ["OptimizerState", "remap_optimizer"]

OptimizerState: TypeAlias = dict[str, dict[str, Tensor]]
"""State-dict key → name of the state (`momentum_buffer`, `exp_avg`, …) → dense tensor."""


def remap_optimizer(
    optimizer: Optimizer,
    graph: UnitGraph,
    old: nn.Module,
    new: nn.Module,
    *,
    old_mask: UnitMask | None = None,
    new_mask: UnitMask | None = None,
    entering: Mapping[str, StateDict] | None = None,
) -> OptimizerState:
    """Let an optimiser of one compact model go on with another, in place: after a cut, a regrowth or any new mask.

    The optimiser keeps its parameter groups, options and hooks, so schedulers that hold it stay valid; only the
    parameters in the groups and the state per entry change. What is returned remembers the state of units that leave:
    passed as `entering` the next time, they find it again.

    ```python
    model.load_state_dict(expand(small.state_dict(), graph, mask, into=model.state_dict()))
    other = compact(model, graph, other_mask)
    kept = remap_optimizer(optimizer, graph, small, other, old_mask=mask, new_mask=other_mask)
    ```

    Args:
        optimizer: Steps parameters of `old`. Parameters of other modules stay in it untouched.
        graph: The units of the dense model.
        old: The model that was trained so far.
        new: The model to train from now on.
        old_mask: What `old` keeps; None for the dense model.
        new_mask: What `new` keeps; None for the dense model.
        entering: State of units that are in `new` and not in `old`, in the form of the result. Where nothing is given it
            starts as that of a fresh optimiser: zero; for Adagrad and Rprop the value that they start from.

    Returns:
        The dense state: entries of `old` as they are, the others from `entering` or as they start. A new dict; entries
        that the optimiser has no state for are absent.

    Raises:
        InvalidValueError: the optimiser keeps state that does not lie entry by entry (LBFGS, the factored moments of
            Adafactor), or steps no parameter of `old`.
        ForeignMaskError: a module, a mask or a tensor of `entering` does not belong to the graph.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidValueError(
            "LBFGS keeps a history of whole steps, which cannot follow a cut; make a new LBFGS over the new model's"
            " parameters, or use an optimiser with state per entry, such as SGD or Adam"
        )
    pairs = _Pairs(graph, old, new, old_mask, new_mask)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(id(parameter) in pairs.names for parameter in held):
        raise InvalidValueError(
            f"the optimiser steps no parameter of the old {type(old).__name__}; pass the model that it was made for"
        )
    found: dict[nn.Parameter, dict[str, Any]] = {}
    remembered: OptimizerState = {}
    for parameter in held:  # all is computed before anything is changed
        if id(parameter) in pairs.names and optimizer.state.get(parameter):
            name = pairs.names[id(parameter)]
            given = (entering or {}).get(name, {})
            found[parameter], remembered[name] = _remapped(optimizer, pairs, parameter, name, given)
    for group in optimizer.param_groups:
        group["params"] = [pairs.successor(parameter) for parameter in group["params"]]
    for parameter, state in found.items():
        del optimizer.state[parameter]
        optimizer.state[pairs.successor(parameter)] = state
    return {name: state for name, state in remembered.items() if state}


class _Pairs:
    """Which parameter of the new model follows which of the old one, and where both lie in the dense model."""

    def __init__(
        self, graph: UnitGraph, old: nn.Module, new: nn.Module, old_mask: UnitMask | None, new_mask: UnitMask | None
    ) -> None:
        self.shapes = graph.shapes
        self.before = _axes(graph, old, old_mask, "old")
        self.after = _axes(graph, new, new_mask, "new")
        entries = named_entries(new)
        self.names: dict[int, str] = {}
        self._successors: dict[int, Tensor] = {}
        for name, entry in named_entries(old).items():
            if id(entry) not in self.names:
                self.names[id(entry)] = name
                self._successors[id(entry)] = entries[name]

    def successor(self, parameter: nn.Parameter) -> Tensor:
        """What to step instead; parameters of other modules stay."""
        return self._successors.get(id(parameter), parameter)


def _axes(graph: UnitGraph, model: nn.Module, mask: UnitMask | None, which: str) -> dict[str, dict[int, Tensor]]:
    """Where the entries of a compact model lie in the dense one: key → axis → positions, of axes that are cut."""
    mask = UnitMask.full(graph) if mask is None else mask
    mask.check(graph)
    indices = graph.kept_indices(mask)
    entries = named_entries(model)
    axes: dict[str, dict[int, Tensor]] = {}
    for name, dense in graph.shapes.items():
        axes[name] = {dim: index for dim, index in indices.get(name, {}).items() if index.numel() < dense[dim]}
        expected = torch.Size(len(axes[name][d]) if d in axes[name] else size for d, size in enumerate(dense))
        if name not in entries or entries[name].shape != expected:
            shape = tuple(entries[name].shape) if name in entries else None
            raise ForeignMaskError(
                f"the {which} {type(model).__name__} has {name!r} of shape {shape}, its mask gives {tuple(expected)};"
                f" pass the mask that it was compacted with as {which}_mask"
            )
    return axes


def _remapped(
    optimizer: Optimizer, pairs: _Pairs, parameter: nn.Parameter, name: str, given: StateDict
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state of one parameter for its successor, and the dense state of that entry."""
    state: dict[str, Any] = {}
    remembered: dict[str, Tensor] = {}
    successor = pairs.successor(parameter)
    for kind, value in optimizer.state[parameter].items():
        per_entry = isinstance(value, Tensor) and value.dim() > 0
        if per_entry and value.shape == parameter.shape:
            dense = _start(optimizer, pairs.shapes[name], name, kind, value, given)
            remembered[kind] = scatter(value.detach(), dense, pairs.before[name])
            state[kind] = gather(remembered[kind], pairs.after[name]).to(successor.device)
            if state[kind].data_ptr() == remembered[kind].data_ptr():
                state[kind] = state[kind].clone()
        elif per_entry or isinstance(value, list | tuple | dict):
            raise InvalidValueError(
                f"{type(optimizer).__name__} keeps {kind!r} of {name!r} in another shape than the parameter, so it cannot"
                " follow a change of mask; make a new optimiser over the new model's parameters"
            )
        else:
            state[kind] = value
    return state, remembered


def _start(optimizer: Optimizer, shape: torch.Size, name: str, kind: str, like: Tensor, given: StateDict) -> Tensor:
    if kind not in given:
        return like.new_full(shape, first_value(optimizer, kind))
    if given[kind].shape != shape:
        raise ForeignMaskError(
            f"entering state {kind!r} of {name!r} has shape {tuple(given[kind].shape)}, the dense model has {tuple(shape)};"
            " pass what an earlier remap_optimizer returned"
        )
    return given[kind].detach().to(like)
