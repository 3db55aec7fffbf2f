"""Find the optimizers, and wrappers such as DistributedDataParallel, that hold the parameters of a learnable mask.

Global hooks of torch find an optimizer at its first step, and a wrapper when it gets the mask.

A mask never changes while an optimizer steps: sharpness-aware optimizers perturb the weights, call the model, and then step
from the original weights.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from sparsekit.errors import InvalidValueError, UnsupportedModelError
from sparsekit.surgery.files import hash_state
from sparsekit.surgery.optimizer_state import HasState, refuse_history


class OptimizerSet:
    """Weak references to optimizers, in order of addition. A copy of a mask starts with none."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()  # ordered, unlike a WeakSet
        self.just_loaded: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers with newly loaded state that have neither stepped nor followed a change of the mask since."""
        self.process_group: Any = None  # of the DistributedDataParallel that averages gradients, if there is one
        self.stepping: list[Any] = []
        """Optimizers in the middle of a step, and blocks that freeze the mask, the outermost first: one may step another."""

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._known))

    def __contains__(self, optimizer: object) -> bool:
        return optimizer in self._known

    def __reduce__(self) -> tuple[type[OptimizerSet], tuple[()]]:
        return OptimizerSet, ()

    def add(self, optimizer: HasState, masked: Any) -> None:
        """Install hooks on `optimizer`, so that its state changes with the mask; see `LearnableMask.add_optimizer`."""
        if hasattr(optimizer, "param_groups") and not _holds(optimizer, masked):
            raise InvalidValueError(
                f"this {type(optimizer).__name__} steps no parameter of the mask; make it over masked.parameters()"
            )
        if optimizer in self:
            return
        if masked.may_change:
            refuse_history(optimizer)
        self._known[optimizer] = None
        if isinstance(optimizer, Optimizer):
            if optimizer.state:  # counts as just loaded
                self.just_loaded.add(optimizer)
            reference = weakref.ref(masked)
            _refuse_foreign(optimizer, masked)
            optimizer.register_state_dict_post_hook(functools.partial(_sign, reference))
            optimizer.register_step_pre_hook(functools.partial(_before_step, reference))
            optimizer.register_step_post_hook(functools.partial(_after_step, reference))
            optimizer.register_load_state_dict_post_hook(functools.partial(_after_load, reference))

    @contextmanager
    def block(self, end: Callable[[], None]) -> Iterator[None]:
        """Keep the mask fixed inside the block, and call `end` afterwards."""
        own = object()
        self.stepping.append(own)
        try:
            yield
        finally:
            self.finish(own)
            end()

    def finish(self, step: object) -> None:
        """End a step or a block, and failed steps within it."""
        found = (at for at, each in enumerate(self.stepping) if each is step)
        del self.stepping[next(found, len(self.stepping)) :]

    def check_change(self, masked: Any) -> None:
        """Raise InvalidValueError if an optimizer is an LBFGS with history, or `_refuse_foreign` refuses its loaded state."""
        for optimizer in self:
            _refuse_foreign(optimizer, masked)
            if any(state.get("n_iter") for state in optimizer.state.values()):
                refuse_history(optimizer)


_OF = "sparsekit.of"
"""Key of a parameter group in a saved state for the hashes of `_owner`, and a hash of the dense weights when it was saved."""


def _sign(reference: Callable[[], Any], _optimizer: Optimizer, state: dict[str, Any]) -> None:
    masked = reference()
    if masked is not None:
        signed = [*_owner(masked), hash_state(masked.dense_state())]
        for group in state["param_groups"]:
            group[_OF] = signed


def _owner(masked: Any) -> tuple[str, str, str]:
    """Return hashes of the units of the graph, of the weights that training began with, and of the mask."""
    mask = torch.cat([*masked.unit_mask().values()]).numpy().tobytes()
    return masked.units, masked.origin, hashlib.sha256(mask).hexdigest()[:16]


def _refuse_foreign(optimizer: Any, masked: Any) -> None:
    """Raise InvalidValueError if the loaded state of an optimizer belongs to another mask, model or training."""
    given = {tuple(group.pop(_OF)) for group in getattr(optimizer, "param_groups", ()) if _OF in group}
    for graph, origin, mask, ends in given:
        own, load = _owner(masked), "load the mask saved with it as well: masked.load_state_dict(...), or "
        if graph != own[0]:
            what, load = "a mask over another model, or over one that was traced with other options", ""
        elif mask != own[2]:
            what = "other units than the mask keeps"
        elif own[1] not in (origin, ends):  # a mask may also begin with the weights that were saved with the state
            what = "a training that began with other weights"
        else:
            continue
        raise InvalidValueError(
            f"the state that this {type(optimizer).__name__} has loaded belongs to {what}; {load}make a new optimizer"
        )


def _before_step(reference: Callable[[], Any], optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    masked = reference()
    if masked is None:
        return None
    if masked.may_change:
        refuse_history(optimizer)
    _refuse_foreign(optimizer, masked)
    masked.optimizers.just_loaded.discard(optimizer)
    masked.optimizers.finish(optimizer)
    masked.optimizers.stepping.append(optimizer)
    closures = [value for value in (*args[1:], *kwargs.values()) if callable(value)]
    if not closures:
        _take(masked, optimizer, None)
        return None
    rule = masked._rule
    due = rule.due
    # Gradients from before the closure: either accumulated batches, or SAM's first step, whose gradients are discarded.
    before = {leaf: leaf.grad.clone() for leaf in masked.parameters() if leaf.grad is not None} if due else None
    calls: list[object] = []

    def watched(value: Any) -> Any:
        """Return an argument of the step, with closures wrapped: torch calls no hook after a closure that fails."""

        def run() -> Any:
            if not calls:
                rule.due = False
            try:
                result = value()
            except BaseException:
                _after_step(reference, optimizer)
                raise
            if not calls:
                gradients = None if rule.due else before
                rule.due = rule.due or due
                _take(masked, optimizer, gradients)
            calls.append(value)
            return result

        return functools.wraps(value)(run) if callable(value) else value

    return (args[0], *map(watched, args[1:])), {name: watched(value) for name, value in kwargs.items()}


def _take(masked: Any, optimizer: Optimizer, gradients: Mapping[Tensor, Tensor] | None) -> None:
    """Update importance from the latest backward pass, if any; with `gradients` None, from the gradients of the weights."""
    overflow: Tensor | None = getattr(optimizer, "found_inf", None)
    # A fused optimizer divides by the scale of a GradScaler itself, and skips a step that overflowed.
    if masked._rule.due and (overflow is None or not bool(overflow)):
        scale = getattr(optimizer, "grad_scale", None)
        masked._rule.take(masked.scores, masked.vectors, gradients, scale, masked.optimizers.process_group)


def _after_step(reference: Callable[[], Any], optimizer: Optimizer, *_: Any) -> None:
    masked = reference()
    if masked is not None:
        masked.optimizers.finish(optimizer)
        masked.update_mask()


def _after_load(reference: Callable[[], Any], optimizer: Optimizer) -> None:
    masked = reference()
    if masked is not None:
        masked.optimizers.just_loaded.add(optimizer)


_masks: weakref.WeakSet[Any] = weakref.WeakSet()
_seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""Optimizer → number of its parameter groups when it was last searched for leaves."""


def _holds(optimizer: Any, masked: Any) -> bool:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(id(leaf) in held for leaf in masked.parameters())


def _find(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if _seen.get(optimizer) != len(optimizer.param_groups):
        for masked in list(_masks):
            if optimizer in masked.optimizers or not _holds(optimizer, masked):
                continue
            if masked.mask_changed and any(_has_begun(optimizer.state.get(leaf) or {}, leaf) for leaf in masked.parameters()):
                raise InvalidValueError(
                    f"the state of this {type(optimizer).__name__} predates the current mask; call"
                    " masked.add_optimizer(optimizer) after optimizer.load_state_dict"
                )
            masked.add_optimizer(optimizer)
        _seen[optimizer] = len(optimizer.param_groups)


def _has_begun(state: Mapping[str, Any], leaf: Tensor) -> bool:
    # State before the first step, in the shape of the leaf, holds initial values only, whichever units are kept.
    fresh = "step" in state and float(state["step"]) == 0.0
    fits = all(value.shape == leaf.shape for value in state.values() if isinstance(value, Tensor) and value.dim())
    return bool(state) and not (fresh and fits)


def _guard(wrapper: nn.Module, _name: str, module: nn.Module | None) -> None:
    if isinstance(wrapper, AveragedModel | DistributedDataParallel) and module is not None:
        for part in module.modules():
            if part in _masks:
                if not isinstance(wrapper, AveragedModel):
                    _join(wrapper, part)
                elif part.may_change:
                    raise UnsupportedModelError(
                        "AveragedModel averages parameters entry by entry, and a changed mask puts other units there; make"
                        " it after the last cut (masked.may_change is False), average the compact model,"
                        " AveragedModel(masked.compact()), or wrap a mask without learning="
                    )


@functools.cache
def _install_hooks() -> None:
    register_optimizer_step_pre_hook(_find)
    register_module_module_registration_hook(_guard)


def watch(masked: Any) -> None:
    """Find every optimizer that holds leaves of a learnable mask at its first step, and every wrapper of the mask."""
    _install_hooks()
    _masks.add(masked)


def _join(wrapper: DistributedDataParallel, masked: Any) -> None:
    """Load the first rank's state, since DistributedDataParallel itself broadcasts only the narrow entries."""
    group: Any = wrapper.process_group
    box: list[Any] = [{name: value.cpu() for name, value in masked.state_dict().items()}]
    torch.distributed.broadcast_object_list(box, src=torch.distributed.get_global_rank(group, 0), group=group)
    masked.load_state_dict(box[0])
    masked.optimizers.process_group = group
    _refuse_other_shapes(wrapper, masked)


def _refuse_other_shapes(wrapper: DistributedDataParallel, masked: Any) -> None:
    before = [weight.shape for weight in masked.parameters()]

    def check(*_: Any) -> None:
        if [weight.shape for weight in masked.parameters()] != before:
            raise UnsupportedModelError(
                "the shapes of the learnable mask's parameters changed (another ratio?) after it was wrapped in"
                " DistributedDataParallel, which would no longer average their gradients; wrap it again:"
                " ddp = DistributedDataParallel(masked)"
            )

    wrapper.register_forward_pre_hook(check)
