"""Find the optimisers that step the leaves of a learnable mask, so that their state can follow a change of the mask.

Any torch optimiser over `masked.parameters()` is found without being registered: when it is made, loaded, copied or
unpickled, and at each step, around which torch calls global hooks.

A mask stands still while an optimiser steps. Sharpness-aware optimisers climb, call the model, and step from the weights before
the climb; a unit that left in between would keep its climb. So the mask is held while a closure runs within a step, and from
`first_step` to `second_step`, the names by which such optimisers are called in two parts.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sparsekit._torch import watch_optimizers
from sparsekit.errors import InvalidValueError
from sparsekit.training.fused_kernels import refuse_broken_kernels
from sparsekit.training.wrappers import warn_of_eval_mode

__all__ = ["OptimizerSet", "Watched", "holds", "just_restored", "refuse_history", "settle", "watch"]


class Watched(Protocol):
    """An object whose methods are called before and after each step of an optimiser over its leaves."""

    optimizers: OptimizerSet

    def leaves(self) -> list[nn.Parameter]:
        """The parameters whose optimisers are watched."""
        ...

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before `optimizer` changes the leaves."""
        ...

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after `optimizer` changed the leaves."""
        ...

    def after_restore(self, optimizer: Optimizer) -> None:
        """Called after `optimizer` was loaded, copied or unpickled."""
        ...


class OptimizerSet:
    """Weak references to optimisers, in the order in which they were found. A copy of a mask starts with none."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[Optimizer]] = []
        self._holding: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    @property
    def hold(self) -> bool:
        """Whether one of them is in the middle of a step, in which the mask must not change."""
        return len(self._holding) > 0

    def begin(self, optimizer: Optimizer) -> None:
        """Hold the mask; again has no effect."""
        self._holding.add(optimizer)

    def end(self, optimizer: Optimizer) -> None:
        """Release the mask."""
        self._holding.discard(optimizer)

    def __iter__(self) -> Iterator[Optimizer]:
        return iter([found for found in (reference() for reference in self._references) if found is not None])

    def __contains__(self, optimizer: object) -> bool:
        return any(found is optimizer for found in self)

    def add(self, optimizer: Optimizer) -> None:
        """Add `optimizer`; it leaves the set when it is deleted."""
        if optimizer not in self:
            self._references = [r for r in self._references if r() is not None] + [weakref.ref(optimizer)]

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizerSet:
        return OptimizerSet()

    def __reduce__(self) -> tuple[type[OptimizerSet], tuple[()]]:
        return OptimizerSet, ()


_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_known: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[weakref.ref[Any]]]] = weakref.WeakKeyDictionary()
_restored: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_hooked = False


def just_restored(optimizer: Optimizer) -> bool:
    """Whether `optimizer` was loaded, copied or unpickled, and has neither stepped nor followed a remask since."""
    return optimizer in _restored


def settle(optimizers: Iterable[Optimizer]) -> None:
    """Say that the state of `optimizers` belongs to the present units, since it has followed a remask."""
    for optimizer in optimizers:
        _restored.discard(optimizer)


def holds(optimizer: Optimizer, leaf: nn.Parameter) -> bool:
    """Whether `leaf` is among the parameters that `optimizer` steps."""
    return any(parameter is leaf for group in optimizer.param_groups for parameter in group["params"])


def refuse_history(optimizers: OptimizerSet, leaves: Iterable[nn.Parameter]) -> None:
    """Raise where the mask changes below a history of whole steps, or in the middle of a step: they belong to the units before.

    Raises:
        InvalidValueError: one of `optimizers` is an LBFGS over some of `leaves` that has begun, or is in the middle of a step.
    """
    for optimizer in optimizers:
        begun = isinstance(optimizer, torch.optim.LBFGS) and any(state.get("n_iter") for state in optimizer.state.values())
        if begun and any(holds(optimizer, leaf) for leaf in leaves):
            raise InvalidValueError(
                "LBFGS keeps a history of whole steps, which cannot follow a change of mask; use an optimiser with state"
                " per entry, such as SGD or Adam, or keep ratio and mask by a criterion that does not learn: Magnitude()"
            )
    if optimizers.hold:
        raise InvalidValueError(
            "the mask cannot change in the middle of an optimiser's step, such as between SAM's first_step and second_step:"
            " units that leave would keep the climb; change it after the step"
        )


def _owners(optimizer: Optimizer) -> list[Any]:
    """Return the watched objects whose leaves `optimizer` holds; they are looked up again when it gains parameter groups."""
    groups = len(optimizer.param_groups)
    known = _known.get(optimizer)
    if known is None or known[0] != groups:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        owners = [item for item in _watched if any(id(leaf) in held for leaf in item.leaves())]
        _known[optimizer] = (groups, [weakref.ref(item) for item in owners])
        for item in owners:
            item.optimizers.add(optimizer)
        return owners
    return [item for item in (reference() for reference in known[1]) if item is not None]


def _meet(optimizer: Optimizer, item: Watched) -> None:
    """Introduce a restored optimiser to an object whose leaves it may hold."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(id(leaf) in held for leaf in item.leaves()):
        _known.pop(optimizer, None)
        item.optimizers.add(optimizer)
        item.after_restore(optimizer)


def _restored_or_copied(optimizer: Optimizer) -> None:
    _restored.add(optimizer)
    for item in list(_watched):
        _meet(optimizer, item)
    _made(optimizer)


def _made(optimizer: Optimizer) -> None:
    """Find the owners of its leaves before its first step, and whether it is called in two parts."""
    if _owners(optimizer) and callable(getattr(optimizer, "first_step", None)):
        _wrap_part(type(optimizer), "first_step", lambda items, it: [item.optimizers.begin(it) for item in items])
        _wrap_part(type(optimizer), "second_step", lambda items, it: [item.optimizers.end(it) for item in items])


def _wrap_part(kind: type[Optimizer], name: str, afterwards: Callable[[list[Any], Optimizer], Any]) -> None:
    """Call `afterwards` with the watched objects and the optimiser after a method of a class of optimisers, once only."""
    part = getattr(kind, name, None)
    if part is None or hasattr(part, "_watched_by_sparsekit"):
        return

    @functools.wraps(part)
    def watched(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = part(self, *args, **kwargs)
        afterwards(_owners(self), self)
        return result

    watched._watched_by_sparsekit = True  # type: ignore[attr-defined]
    setattr(kind, name, watched)


def _held(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """The closure of a step, run with the masks held."""

    @functools.wraps(closure)
    def run() -> Any:
        with _hold(optimizer):
            return closure()

    return run


@contextmanager
def _hold(optimizer: Optimizer) -> Iterator[None]:
    fresh = [item for item in _owners(optimizer) if not item.optimizers.hold]
    for item in fresh:
        item.optimizers.begin(optimizer)
    try:
        yield
    finally:
        for item in fresh:
            item.optimizers.end(optimizer)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    _restored.discard(optimizer)
    owners = _owners(optimizer)
    if owners:
        refuse_broken_kernels(optimizer)
    for item in owners:
        if isinstance(item, nn.Module):
            warn_of_eval_mode(item)
        item.before_step(optimizer)
    # LBFGS calls its closure many times; a change of mask is refused at the first.
    if not owners or isinstance(optimizer, torch.optim.LBFGS) or not any(map(callable, [*args[1:], *kwargs.values()])):
        return None
    hold = functools.partial(_held, optimizer)
    return (
        (args[0], *(hold(value) if callable(value) else value for value in args[1:])),
        {name: hold(value) if callable(value) else value for name, value in kwargs.items()},
    )


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001 - torch's signature
    for item in _owners(optimizer):
        item.after_step(optimizer)


def watch(item: Watched) -> None:
    """Call the methods of `item` around steps of every optimiser that holds its leaves, until `item` is deleted.

    Optimisers that were copied or unpickled before it, together with its leaves, are found too.
    """
    global _hooked
    if not _hooked:
        register_optimizer_step_pre_hook(_before)
        register_optimizer_step_post_hook(_after)
        watch_optimizers(made=_made, restored=_restored_or_copied)
        _hooked = True
    _watched.add(item)
    for optimizer in list(_restored):
        _meet(optimizer, item)
