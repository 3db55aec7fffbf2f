"""Update the state of optimizers when the units of a model change."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsekit.errors import InvalidValueError
from sparsekit.graph.index import Axes, gather, narrow_shape, scatter_

_FACTORED = {"row_var", "col_var"}
"""Moments of Adafactor: means over rows or columns, even if a matrix of one row or column has the same shape."""


class HasState(Protocol):
    """An optimizer, or another object with tensors in the shape of each parameter that must follow a change of mask."""

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:
        """Parameter → name of a state → its value."""
        ...


class Stay(NamedTuple):
    """The entries of a tensor that both of two masks keep."""

    old: Axes
    """Axis → their positions in the narrow tensor under the first mask; axes on which nothing changes are absent."""
    new: Axes
    """The same under the second mask."""
    shape: torch.Size
    """Shape of the narrow tensor under the second mask."""


def entries_that_stay(shape: torch.Size, before: Axes, after: Axes) -> Stay | None:
    """Return the entries of a dense tensor of `shape` that two masks both keep; None if the masks keep the same entries.

    `before` and `after` are axis → int64 (kept,), ascending dense positions; absent axes are whole.
    """
    old, new = {}, {}
    for dim in sorted({*before, *after}):
        whole = torch.arange(shape[dim])
        first, second = before.get(dim, whole), after.get(dim, whole)
        if not torch.equal(first, second):
            old[dim] = torch.isin(first, second).nonzero().reshape(-1)
            new[dim] = torch.isin(second, first).nonzero().reshape(-1)
    return Stay(old, new, narrow_shape(shape, after)) if old else None


def first_value(owner: object, name: str, leaf: object) -> float:
    """Return the initial state of an entry of `leaf` in a torch optimizer: zero, with two exceptions."""
    if isinstance(owner, torch.optim.Adagrad) and name == "sum":
        return float(owner.defaults["initial_accumulator_value"])
    if isinstance(owner, torch.optim.Rprop) and name == "step_size":
        group = next(group for group in owner.param_groups if any(leaf is parameter for parameter in group["params"]))
        return float(group["lr"])
    return 0.0


def carried_state(owner: object, state: Mapping[str, Any], leaf: object, shape: torch.Size, stay: Stay) -> dict[str, Any]:
    """Return the state of a parameter after its units have changed: entries that stay keep theirs, new ones get initial values.

    `shape` is the shape before the change. The state is empty, as before the first step, unless it is known to hold one value
    for each entry. That needs an optimizer of torch's own classes, and tensors of the parameter's shape. Other optimizers may
    keep a second copy of the weights, which must not start at zero, or one scale for a block of entries.
    """
    foreign = isinstance(owner, Optimizer) and not type(owner).__module__.startswith("torch.optim.")
    if foreign or _FACTORED & state.keys():
        return {}
    carried: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, list | tuple | dict):
            return {}
        if isinstance(value, Tensor) and value.dim() > 0:
            if value.shape != shape:
                return {}
            fresh = value.new_full(stay.shape, first_value(owner, name, leaf))
            value = scatter_(gather(value, stay.old), fresh, stay.new)
        carried[name] = value
    return carried


def refuse_history(optimizer: object) -> None:
    """Raise InvalidValueError for LBFGS, whose history of whole steps cannot follow a change of units."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidValueError(
            "LBFGS keeps a history of whole steps, which cannot follow a change of mask; use an optimizer with state for each"
            " entry, such as SGD or Adam, or make a new LBFGS when the mask no longer changes"
        )
