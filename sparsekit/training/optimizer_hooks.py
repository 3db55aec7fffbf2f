"""Find the optimisers that step the leaves of a learnable mask, so that their state can follow a change of the mask.

Any torch optimiser over `masked.parameters()` is found without being registered: torch calls a global hook before and
after each step of every optimiser, and the hook looks up whose leaves the optimiser holds. An optimiser has state before
its first step only if it was loaded, copied or unpickled. All three end in `Optimizer.__setstate__`, for which torch has no
hook, so that method is wrapped.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sparsekit.errors import InvalidValueError
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


def refuse_history(optimizers: Iterable[Optimizer], leaves: Iterable[nn.Parameter]) -> None:
    """Raise where the mask changes below a history of whole steps: it belongs to the units before.

    Raises:
        InvalidValueError: one of `optimizers` is an LBFGS over some of `leaves` that has begun.
    """
    for optimizer in optimizers:
        begun = isinstance(optimizer, torch.optim.LBFGS) and any(state.get("n_iter") for state in optimizer.state.values())
        if begun and any(holds(optimizer, leaf) for leaf in leaves):
            raise InvalidValueError(
                "LBFGS keeps a history of whole steps, which cannot follow a change of mask; use an optimiser with state"
                " per entry, such as SGD or Adam, or keep ratio and mask by a criterion that does not learn: Magnitude()"
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


def _notice_restored() -> None:
    """Wrap `Optimizer.__setstate__`, with which loading, copying and unpickling an optimiser end."""
    original = Optimizer.__setstate__

    @functools.wraps(original)
    def restore(optimizer: Optimizer, state: dict[str, Any]) -> None:
        original(optimizer, state)
        _restored.add(optimizer)
        for item in list(_watched):
            _meet(optimizer, item)

    Optimizer.__setstate__ = restore  # type: ignore[assignment, method-assign]


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001 - torch's signature
    _restored.discard(optimizer)
    for item in _owners(optimizer):
        if isinstance(item, nn.Module):
            warn_of_eval_mode(item)
        item.before_step(optimizer)


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
        _notice_restored()
        _hooked = True
    _watched.add(item)
    for optimizer in list(_restored):
        _meet(optimizer, item)
