"""Meet the optimisers that step the leaves of a learnable mask, so that their state can follow a change of the mask.

Any torch optimiser over `masked.parameters()` is met at its first step, around which torch calls global hooks. Nothing of
torch is changed: what happens to an optimiser before its first step (a checkpoint is loaded into it, and then the mask
changes) is told to the mask by `masked.track(optimizer)`.

A mask stands still while an optimiser steps. Sharpness-aware optimisers climb, call the model, and step from the weights before
the climb; a unit that left in between would keep its climb. So the mask is held while a closure runs within a step. Where such
an optimiser is called in two parts, `masked.held()` says so.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sparsekit.errors import InvalidValueError, UnsupportedModelError
from sparsekit.surgery.optimizer_state import HasState
from sparsekit.surgery.optimizer_state import refuse_history as refuse_lbfgs
from sparsekit.training.wrappers import warn_of_eval_mode


class OptimizerSet:
    """Weak references to optimisers, in the order in which they were met. A copy of a mask starts with none."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()  # ordered, where a WeakSet is not
        self._holds = 0

    @property
    def hold(self) -> bool:
        """Whether one of them is in the middle of a step, in which the mask must not change."""
        return self._holds > 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the mask within the block."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._known))

    def __contains__(self, optimizer: object) -> bool:
        return optimizer in self._known

    def add(self, optimizer: HasState) -> None:
        """Add `optimizer`; it leaves the set when it is deleted."""
        self._known.setdefault(optimizer)

    def __reduce__(self) -> tuple[type[OptimizerSet], tuple[()]]:
        return OptimizerSet, ()


_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_known: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[weakref.ref[Any]]]] = weakref.WeakKeyDictionary()
_introduced: weakref.WeakSet[Optimizer] = weakref.WeakSet()
restored: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimisers that were loaded, and have neither stepped nor followed a change of the mask since."""


def has_begun(state: Mapping[str, Any], leaf: Tensor) -> bool:
    """Whether an optimiser's state of a leaf is that of some units: not before its first step, in the leaf's shape."""
    fresh = "step" in state and float(state["step"]) == 0.0
    fits = all(value.shape == leaf.shape for value in state.values() if isinstance(value, Tensor) and value.dim())
    return bool(state) and not (fresh and fits)


def holds(optimizer: Any, leaf: nn.Parameter) -> bool:
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
            refuse_lbfgs(optimizer)
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
            if optimizer not in item.optimizers:
                item.meet(optimizer)
        return owners
    return [item for item in (reference() for reference in known[1]) if item is not None]


def introduce(optimizer: Optimizer) -> None:
    """Hear of it when an optimiser is loaded; the state that it has when it is introduced counts as just loaded."""
    if optimizer not in _introduced:
        _introduced.add(optimizer)
        optimizer.register_load_state_dict_post_hook(_loaded)
        if optimizer.state:
            restored.add(optimizer)


def _loaded(optimizer: Optimizer) -> None:
    restored.add(optimizer)
    for item in _owners(optimizer):
        item.meet(optimizer)


def _held(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """The closure of a step, run with the masks held."""

    @functools.wraps(closure)
    def run() -> Any:
        with ExitStack() as stack:
            for item in _owners(optimizer):
                stack.enter_context(item.optimizers.held())
            return closure()

    return run


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    owners = _owners(optimizer)
    restored.discard(optimizer)
    if owners:
        _refuse_broken_kernels(optimizer)
    for item in owners:
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


_TRIED = 64
"""Several vectors of every instruction set: torch 2.13 on a CPU steps the rest of a tensor and leaves whole vectors out."""


def _refuse_broken_kernels(optimizer: Optimizer) -> None:
    """Check that the fused kernel of an SGD steps tensors of the dtype of its parameters.

    Raises:
        UnsupportedModelError: it leaves entries as they are, as SGD with `fused=True` does in torch 2.13 on a CPU with bfloat16
            or float16 parameters.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if group.get("fused"):
            for dtype, device in {(p.dtype, p.device) for p in group["params"] if p.dtype.itemsize < 4}:
                if not _steps(dtype, device):
                    raise UnsupportedModelError(
                        f"SGD(fused=True) of torch {torch.__version__} leaves most entries as they are in {dtype} on {device};"
                        " use foreach=True, or parameters in float32 under torch.autocast"
                    )


@functools.cache
def _steps(dtype: torch.dtype, device: torch.device) -> bool:
    parameter = nn.Parameter(torch.zeros(_TRIED, dtype=dtype, device=device))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=1.0, fused=True).step()
    return bool((parameter.detach() == -1).all())


@functools.cache
def _hook_steps() -> None:
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def watch(item: Any) -> None:
    """Call `before_step` and `after_step` of a learnable mask around steps of every optimiser that holds its leaves."""
    _hook_steps()
    _watched.add(item)
