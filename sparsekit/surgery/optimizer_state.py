"""The state of optimisers follows the units of a model: remap_optimizer(), and what narrow training shares with it."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsekit.errors import ForeignMaskError, InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import Axes, cut_axes, gather, scatter_
from sparsekit.graph.mask import UnitMask
from sparsekit.graph.state import StateDict
from sparsekit.surgery.rebuild import named_entries

REDUCED = {"row_var": 1, "col_var": 2}
"""Adafactor's moments of rows and columns → the axis, counted from the end, that they are a mean over.

Those of a matrix of one row have its shape, and are means none the less.
"""


def reduced_axis(name: str, rank: int) -> int | None:
    """Return the axis over which a factored moment is a mean, for a leaf of `rank` axes; None for other state."""
    return rank - REDUCED[name] if name in REDUCED and rank > 1 else None


def state_shape(name: str, shape: torch.Size) -> torch.Size:
    """Return the shape of the state of that name of an entry of `shape`."""
    axis = reduced_axis(name, len(shape))
    return shape if axis is None else torch.Size([1 if dim == axis else size for dim, size in enumerate(shape)])


def _quantised(value: Tensor, leaf: Tensor) -> bool:
    """Whether a value holds codes of blocks of entries: torchao's subclasses, or bytes as those of bitsandbytes."""
    if value.shape != leaf.shape or value.dim() == 0:
        return False
    return type(value).dequantize is not Tensor.dequantize or value.dtype in (torch.uint8, torch.int8)


def check_movable(optimizers: Iterable[object], leaves: Iterable[nn.Parameter]) -> None:
    """Check that the state of optimisers can follow a change of mask.

    Raises:
        InvalidValueError: state is quantised in blocks, whose entries would change their scale with their place.
    """
    leaves = list(leaves)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            continue
        for leaf in leaves:
            for name, value in (optimizer.state.get(leaf) or {}).items():
                if isinstance(value, Tensor) and _quantised(value, leaf):
                    raise InvalidValueError(
                        f"{type(optimizer).__name__} keeps {name!r} quantised in blocks of entries, which cannot follow a"
                        " change of mask; use the optimiser with state of full precision, such as torch.optim.AdamW, or keep"
                        " ratio and mask by a criterion that does not learn: Magnitude()"
                    )


OptimizerState: TypeAlias = dict[str, dict[str, Tensor]]
"""State-dict key → name of the state (`momentum_buffer`, `exp_avg`, …) → dense tensor."""

Narrow: TypeAlias = Callable[[str, str, Tensor], Tensor]
Whole: TypeAlias = Callable[[str, str, Tensor, Tensor], Tensor]


def flat(state: OptimizerState, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of `state` under prefix, name of the state and key, as in `exp_avg.body.0.weight`."""
    return {f"{prefix}{kind}.{key}": value for key, kinds in state.items() for kind, value in kinds.items()}


def take_flat(entries: dict[str, Any], prefix: str) -> OptimizerState:
    """Move what `flat` made with the same prefix out of `entries`."""
    state: OptimizerState = {}
    for full in [name for name in entries if name.startswith(prefix)]:
        kind, _, key = full.removeprefix(prefix).partition(".")
        state.setdefault(key, {})[kind] = entries.pop(full)
    return state


class HasState(Protocol):
    """Whatever keeps tensors per leaf that must follow a change of mask: every torch optimiser does.

    State of units that enter for the first time starts from `first_value`; from the dense weights where it is a copy of the
    weights (`copies_of_weights`); or from `origin(key)` where the object has such a method: the dense tensor for the entry of
    that state-dict key.
    """

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:
        """Leaf → name → value; tensors of the leaf's shape follow the units."""
        ...


def first_value(owner: object, name: str) -> float:
    """Return what a torch optimiser puts into the state of an entry before its first step: zero but for two of them."""
    if isinstance(owner, torch.optim.Adagrad) and name == "sum":
        return float(owner.defaults["initial_accumulator_value"])
    if isinstance(owner, torch.optim.Rprop) and name == "step_size":
        return float(owner.defaults["lr"])
    return 0.0


def copies_of_weights(owner: HasState, leaves: Iterable[Tensor]) -> set[str]:
    """Name the state that holds other weights: SAM's `old_p`, Lookahead's `slow`, the `z` of schedule-free optimisers.

    Such state is nearer to the weights than half of their norm, over all `leaves` together. The optimisers of torch have none
    that their steps read.
    """
    if not isinstance(owner, Optimizer) or type(owner).__module__.startswith("torch.optim."):
        return set()
    distance: dict[str, float] = {}
    norm: dict[str, float] = {}
    with torch.no_grad():
        for leaf in leaves:
            for name, value in state_of_shape(owner, leaf):
                if value.is_floating_point():
                    weights = leaf.detach().to(device=value.device)
                    distance[name] = distance.get(name, 0.0) + float((value - weights).float().square().sum())
                    norm[name] = norm.get(name, 0.0) + float(weights.float().square().sum())
    return {name for name in distance if distance[name] < 0.25 * norm[name]}


def moving_state(owner: HasState, leaf: Tensor) -> Iterator[tuple[str, Tensor, int | None]]:
    """Yield (name, tensor, axis) of the state that follows the units of `leaf`.

    Most lies entry by entry, and the axis is None. Factored moments do along all axes but the one that they are a mean over: a
    matrix of 8 rows and 5 columns has a moment (8, 1) whose rows follow the units of the rows, and a moment (1, 5) whose
    columns follow those of the columns.
    """
    for name, value in (owner.state.get(leaf) or {}).items():
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape == state_shape(name, leaf.shape):
            yield name, value, reduced_axis(name, leaf.dim())


def state_of_shape(owner: HasState, leaf: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the state of `leaf` that lies entry by entry."""
    return ((name, value) for name, value, reduced in moving_state(owner, leaf) if reduced is None)


def other_state(owner: HasState, leaf: Tensor, shape: torch.Size) -> list[str]:
    """Name the state that cannot follow the units of `leaf`, which has or had `shape`: factored moments, histories."""
    return [
        name
        for name, value in (owner.state.get(leaf) or {}).items()
        if isinstance(value, list | tuple | dict)
        or (isinstance(value, Tensor) and value.dim() > 0 and (value.shape != shape or name in REDUCED))
    ]


class SavedState:
    """Dense copies of per-entry state: what a unit leaves behind, it finds again when it returns.

    Args:
        shapes: State-dict key → dense shape.
        leaves: The parameters whose state is saved.
        unclaimed: Copies of an earlier run, for optimisers that take them with `claim`.
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        leaves: Sequence[Tensor],
        unclaimed: Mapping[str, StateDict] | None = None,
    ) -> None:
        self._shapes = shapes
        self._leaves = leaves
        self._unclaimed = unclaimed or {}
        self._dense: WeakKeyDictionary[Any, dict[tuple[str, str], Tensor]] = WeakKeyDictionary()
        self._copies: WeakKeyDictionary[Any, dict[str, bool]] = WeakKeyDictionary()

    def dense(self, owner: HasState, key: str, name: str, like: Tensor, weights: Callable[[], Tensor]) -> Tensor:
        """Return the dense copy of one kind of state, to be written to. An owner that is gone takes its copies with it.

        Args:
            owner: Whose state.
            key: State-dict key of the entry.
            name: The kind, such as `momentum_buffer`.
            like: Says device and dtype of a copy that is made now.
            weights: Returns the dense weights of the entry, where units start whose state is a copy of the weights.
        """
        copies = self._dense.setdefault(owner, {})
        if (key, name) not in copies:
            copies[key, name] = self._start(owner, key, name, like, weights).to(device=like.device, dtype=like.dtype)
        return copies[key, name]

    def _holds_weights(self, owner: HasState, name: str) -> bool:
        """Decide it once, when the first leaf moves: later ones are then compared as they were together."""
        known = self._copies.setdefault(owner, {})
        if name not in known:
            known[name] = name in copies_of_weights(owner, self._leaves)
        return known[name]

    def _start(self, owner: HasState, key: str, name: str, like: Tensor, weights: Callable[[], Tensor]) -> Tensor:
        origin: Callable[[str], Tensor] | None = getattr(owner, "origin", None)
        if origin is not None:
            return origin(key)
        if self._holds_weights(owner, name):
            return weights().detach().clone()
        return like.new_full(state_shape(name, self._shapes[key]), first_value(owner, name))

    def claim(self, owner: HasState, leaves: Mapping[str, Tensor], narrow: Narrow) -> None:
        """Give `owner` the unclaimed copies of the state that it has for `leaves`, state-dict key → leaf.

        Where several owners left state of one kind, the copy is taken whose kept entries the owner has: `narrow` makes them of
        (key, name, dense).
        """
        for key, kinds in self._unclaimed.items():
            for name, value in (owner.state.get(leaves.get(key)) or {}).items():
                shape = state_shape(name, self._shapes[key])
                found = [copy for kind, copy in kinds.items() if kind.partition(":")[0] == name and copy.shape == shape]
                if isinstance(value, Tensor) and found:
                    same = [copy for copy in found[1:] if torch.equal(narrow(key, name, copy).to(value), value)]
                    copies = self._dense.setdefault(owner, {})
                    copies[key, name] = (same or found)[0].to(device=value.device, dtype=value.dtype, copy=True)

    def forget_unclaimed(self) -> None:
        """Drop the unclaimed copies: a remask makes them out of date."""
        self._unclaimed = {}

    def state(self, leaves: Mapping[str, Tensor], whole: Whole) -> OptimizerState:
        """Return copies of all copies, with the entries that the owners hold for `leaves`, state-dict key → leaf.

        The second owner that has state of one kind for one entry leaves it as `momentum_buffer:2`, and so on. `whole` puts the
        kept entries into a dense copy, which it may write to: (key, name, narrow, dense).
        """
        found = {key: {name: value.clone() for name, value in kinds.items()} for key, kinds in self._unclaimed.items()}
        taken: dict[tuple[str, str], int] = {}
        for owner, copies in self._dense.items():
            for (key, name), value in copies.items():
                held = (owner.state.get(leaves.get(key)) or {}).get(name)
                if isinstance(held, Tensor):
                    number = taken[key, name] = taken.get((key, name), 0) + 1
                    kind = name if number == 1 else f"{name}:{number}"
                    found.setdefault(key, {})[kind] = whole(key, name, held, value.clone())
        return found

    def apply_to_tensors(self, function: Callable[[Tensor], Tensor]) -> None:
        """Move every copy with `function`."""
        self._unclaimed = {key: {n: function(value) for n, value in kinds.items()} for key, kinds in self._unclaimed.items()}
        for copies in self._dense.values():
            copies.update({key: function(tensor) for key, tensor in copies.items()})


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
            starts as that of a fresh optimiser: zero; for Adagrad and Rprop the value that they start from; for state that is a
            copy of the weights (SAM, Lookahead) the weights of `new`.

    Returns:
        The dense state: entries of `old` as they are, the others from `entering` or as they start. A new dict; entries
        that the optimiser has no state for are absent. NaN in a copy of the weights stands for what neither model has had.

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
    before, after = _axes(graph, old, old_mask, "old"), _axes(graph, new, new_mask, "new")
    entries = named_entries(new)
    successors: dict[int, tuple[str, Tensor]] = {}
    for name, entry in named_entries(old).items():
        successors.setdefault(id(entry), (name, entries[name]))
    held = [p for group in optimizer.param_groups for p in group["params"]]
    ours = [parameter for parameter in held if id(parameter) in successors]
    if not ours:
        raise InvalidValueError(
            f"the optimiser steps no parameter of the old {type(old).__name__}; pass the model that it was made for"
        )
    saved = SavedState(graph.shapes, ours)
    copies = copies_of_weights(optimizer, ours)
    found: dict[nn.Parameter, dict[str, Any]] = {}
    remembered: OptimizerState = {}
    for parameter in ours:  # all is computed before anything is changed
        if not optimizer.state.get(parameter):
            continue
        name, successor = successors[id(parameter)]
        if lost := other_state(optimizer, parameter, parameter.shape):
            raise InvalidValueError(
                f"{type(optimizer).__name__} keeps {lost[0]!r} of {name!r} in another shape than the parameter, so it cannot"
                " follow a change of mask; make a new optimiser over the new model's parameters"
            )
        state = found[parameter] = dict(optimizer.state[parameter])
        weights = functools.partial(_expanded, successor.detach(), graph.shapes[name], after[name])
        for kind, value in state_of_shape(optimizer, parameter):
            start = (entering or {}).get(name, {}).get(kind)
            if start is not None and start.shape != graph.shapes[name]:
                raise ForeignMaskError(
                    f"entering state {kind!r} of {name!r} has shape {tuple(start.shape)}, the dense model has"
                    f" {tuple(graph.shapes[name])}; pass what an earlier remap_optimizer returned"
                )
            if start is None:
                start = saved.dense(optimizer, name, kind, value, weights)
            else:
                start = start.detach().to(value, copy=True)
                if kind in copies:
                    start = torch.where(start.isnan(), weights().to(start), start)
            dense = scatter_(value.detach(), start, before[name])
            narrow = gather(dense, after[name])
            state[kind] = (narrow.clone() if narrow is dense else narrow).to(successor.device)
            remembered.setdefault(name, {})[kind] = dense
    for group in optimizer.param_groups:
        group["params"] = [successors[id(p)][1] if id(p) in successors else p for p in group["params"]]
    for parameter, state in found.items():
        del optimizer.state[parameter]
        optimizer.state[successors[id(parameter)][1]] = state
    return remembered


def _axes(graph: UnitGraph, model: nn.Module, mask: UnitMask | None, which: str) -> dict[str, Axes]:
    """Where the entries of a compact model lie in the dense one, by state-dict key; only axes that are cut."""
    mask = UnitMask.full(graph) if mask is None else mask
    mask.check(graph)
    graph.check_state(named_entries(model), mask, what=f"the {which} {type(model).__name__} (see {which}_mask)")
    indices = graph.kept_indices(mask)
    return {name: cut_axes(dense, indices.get(name, {})) for name, dense in graph.shapes.items()}


def _expanded(narrow: Tensor, shape: torch.Size, axes: Axes) -> Tensor:
    """The dense tensor with NaN where `narrow` has no entries."""
    return scatter_(narrow, torch.full(shape, torch.nan, dtype=narrow.dtype, device=narrow.device), axes)
