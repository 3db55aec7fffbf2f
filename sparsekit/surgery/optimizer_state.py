"""The state of optimizers follows the units of a model: remap_optimizer(), and what narrow training shares with it."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import Axes, gather, narrow_shape, scatter_
from sparsekit.graph.mask import UnitMask
from sparsekit.surgery.rebuild import named_entries

_FACTORED = {"row_var", "col_var"}
"""Moments of Adafactor: means over rows or columns, even where a matrix of one row or column gives them its own shape."""


class HasState(Protocol):
    """Any object with tensors for each leaf, of the leaf's shape, that follow a change of mask; every optimizer is one."""

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:
        """Leaf → name → value."""
        ...


class Stay(NamedTuple):
    """The entries of a tensor that two masks keep."""

    old: Axes
    """Axis → their positions in the narrow tensor under the first mask; axes on which nothing changes are absent."""
    new: Axes
    """The same under the second mask."""
    shape: torch.Size
    """Shape of the narrow tensor under the second mask."""


def entries_that_stay(shape: torch.Size, before: Axes, after: Axes) -> Stay | None:
    """Compare what two masks keep of a dense tensor of `shape`; None if it is the same.

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
    """Return what a torch optimizer puts into the state of an entry of `leaf` before its first step: zero, but for two."""
    if isinstance(owner, torch.optim.Adagrad) and name == "sum":
        return float(owner.defaults["initial_accumulator_value"])
    if isinstance(owner, torch.optim.Rprop) and name == "step_size":
        group = next(group for group in owner.param_groups if any(leaf is parameter for parameter in group["params"]))
        return float(group["lr"])
    return 0.0


def carried_state(owner: object, state: Mapping[str, Any], leaf: object, shape: torch.Size, stay: Stay) -> dict[str, Any]:
    """Return the state of a leaf after its units have changed: kept entries keep theirs, entering ones start fresh.

    The state is empty, as before the first step, if what the optimizer keeps is not known to be one value for each entry: where
    its class is not torch's own (a second copy of the weights must not start at zero; blocks of quantised entries share a
    scale), or a tensor has not the shape of the leaf.

    Args:
        owner: The optimizer, or another object with state.
        state: Name → value; not changed.
        leaf: Whose state it is; a parameter of the optimizer.
        shape: Of the leaf before the change.
        stay: Which entries stay.
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
            "LBFGS keeps a history of whole steps, which cannot follow a change of mask; make a new LBFGS after the change, or"
            " use an optimizer with state for each entry, such as SGD or Adam"
        )


def remap_optimizer(
    optimizer: Optimizer,
    graph: UnitGraph,
    old: nn.Module,
    new: nn.Module,
    *,
    old_mask: UnitMask | None = None,
    new_mask: UnitMask | None = None,
) -> None:
    """Let an optimizer of one compact model continue with another, in place: after a cut, a regrowth or any new mask.

    The optimizer keeps its parameter groups, options and hooks, so schedulers that hold it stay valid; only the
    parameters in the groups and the state per entry change. Units that both models keep retain their state. Units that are new
    start with that of a fresh optimizer: zero, or the value that Adagrad and Rprop start from. The state of a parameter starts
    fresh as a whole if it is not one value for each entry (the factored moments of Adafactor), or if the optimizer is not one
    of torch's own (`AdamW8bit`, Lookahead).

    ```python
    model.load_state_dict(expand(small.state_dict(), graph, mask, into=model.state_dict()))
    other = compact(model, graph, other_mask)
    remap_optimizer(optimizer, graph, small, other, old_mask=mask, new_mask=other_mask)
    ```

    Args:
        optimizer: Steps parameters of `old`. Parameters of other modules stay in it untouched.
        graph: The units of the dense model.
        old: The model that was trained so far.
        new: The model to train from now on.
        old_mask: What `old` keeps; None for the dense model.
        new_mask: What `new` keeps; None for the dense model.

    Raises:
        InvalidValueError: the optimizer is an LBFGS, or steps no parameter of `old`.
        ForeignMaskError: a module or a mask does not belong to the graph.
    """
    refuse_history(optimizer)
    before, after = _positions(graph, old, old_mask, "old"), _positions(graph, new, new_mask, "new")
    entries = named_entries(new)
    successors: dict[int, tuple[str, Tensor]] = {}
    for name, entry in named_entries(old).items():
        successors.setdefault(id(entry), (name, entries[name]))
    ours = [p for group in optimizer.param_groups for p in group["params"] if id(p) in successors]
    if not ours:
        raise InvalidValueError(
            f"the optimizer steps no parameter of the old {type(old).__name__}; pass the model that it was made for"
        )
    for group in optimizer.param_groups:
        group["params"] = [successors[id(p)][1] if id(p) in successors else p for p in group["params"]]
    for parameter in ours:
        name, successor = successors[id(parameter)]
        state = optimizer.state.pop(parameter, None)
        if state:
            stay = entries_that_stay(graph.shapes[name], before.get(name, {}), after.get(name, {}))
            moved = state if stay is None else carried_state(optimizer, state, successor, parameter.shape, stay)
            optimizer.state[successor] = {
                kind: value.to(successor.device) if isinstance(value, Tensor) and value.dim() > 0 else value
                for kind, value in moved.items()
            }


def _positions(graph: UnitGraph, model: nn.Module, mask: UnitMask | None, which: str) -> dict[str, dict[int, Tensor]]:
    """The positions of the entries of a compact model in the dense one: state-dict key → axis → int64 (kept,)."""
    mask = UnitMask.full(graph) if mask is None else mask
    mask.check(graph)
    graph.check_state(named_entries(model), mask, what=f"the {which} {type(model).__name__} (see {which}_mask)")
    return graph.kept_indices(mask)
