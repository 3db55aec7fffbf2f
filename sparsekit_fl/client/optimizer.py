"""Optimisers of a client: the fused SGD, or any of torch, with schedules within a round and scaled losses."""

import ast
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor

from sparsekit.errors import InvalidValueError, nearest
from sparsekit.foreach import foreach_add, foreach_add_, foreach_mul, foreach_mul_, foreach_norm
from sparsekit.graph import is_finite
from sparsekit_fl.config import TrainingConfig
from sparsekit_fl.optimizers import factor, optimizer_class

Adjust = Callable[[dict[Tensor, Tensor]], dict[Tensor, Tensor]]
"""Changes the gradients of a step: leaf → gradient, of the leaves that have one."""

_FIRST_SCALE, _GROWS_AFTER = 2.0**16, 2000


class _Scale:
    """The factor on a float16 loss that keeps small gradients from vanishing; halves where gradients are not finite."""

    def __init__(self) -> None:
        self.value = _FIRST_SCALE
        self._good = 0

    def undone(self, gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """The gradients over the factor; empty where they are not finite, and the step must be left out."""
        if not all(is_finite(gradient) for gradient in gradients.values()):
            self.value, self._good = max(1.0, self.value / 2), 0
            return {}
        factor_before = self.value
        self._good += 1
        if self._good == _GROWS_AFTER:
            self.value, self._good = self.value * 2, 0
        return dict(zip(gradients, foreach_mul(list(gradients.values()), 1.0 / factor_before), strict=True))


class _Step(ABC):
    """What all optimisers of a client share. `clip`: largest norm of the whole gradient, before weight decay; None: any."""

    def __init__(self, parameters: Iterable[Tensor], *, lr: float, clip: float | None) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.lr = lr
        self._clip = clip
        self.rates: Iterator[float] | None = None
        """Learning rates of the steps, in place of one that is constant."""
        self.scale: _Scale | None = None

    def __call__(self, loss: Tensor, adjusts: Iterable[Adjust] = ()) -> None:
        """Take one step down a loss; `adjusts` change the gradients, one after the other, before clipping."""
        scaled = loss if self.scale is None else loss.float() * self.scale.value
        found = torch.autograd.grad(scaled, self.parameters, allow_unused=True)
        gradients = {leaf: one for leaf, one in zip(self.parameters, found, strict=True) if one is not None}
        with torch.no_grad():
            if self.rates is not None:
                self.lr = next(self.rates)
            if self.scale is not None:
                gradients = self.scale.undone(gradients)
            if not gradients:
                return
            for adjust in adjusts:
                gradients = adjust(gradients)
            self._apply(self._clipped(list(gradients.values())), list(gradients))

    @property
    def holder(self) -> Any:
        """What holds the state of the leaves, so that it can follow a mask."""
        return self

    def _clipped(self, gradients: list[Tensor]) -> list[Tensor]:
        # All out of place, since autograd may hand out expanded or shared tensors.
        if self._clip is None:
            return gradients
        norm = torch.linalg.vector_norm(torch.stack(foreach_norm(gradients)))
        return list(foreach_mul(gradients, (self._clip / (norm + 1e-6)).clamp(max=1.0)))

    @abstractmethod
    def _apply(self, gradients: list[Tensor], parameters: list[Tensor]) -> None:
        """Change the leaves that have a gradient."""


class SgdStep(_Step):
    """Stochastic gradient descent on a few fused operations; the same numbers as `torch.optim.SGD`."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        clip: float | None = None,
    ) -> None:
        super().__init__(parameters, lr=lr, clip=clip)
        self._momentum = momentum
        self._weight_decay = weight_decay
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        """Leaf → name → tensor, as in a torch optimiser, which follows the units of a learnable mask."""

    def _apply(self, gradients: list[Tensor], parameters: list[Tensor]) -> None:
        if self._weight_decay:
            gradients = list(foreach_add(gradients, parameters, alpha=self._weight_decay))
        if self._momentum:
            velocity = [self._velocity(parameter) for parameter in parameters]
            foreach_mul_(velocity, self._momentum)
            foreach_add_(velocity, gradients)
            gradients = velocity
        foreach_add_(parameters, gradients, alpha=-self.lr)

    def _velocity(self, parameter: Tensor) -> Tensor:
        state = self.state.setdefault(parameter, {})
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]


class TorchStep(_Step):
    """An optimiser of torch, which the options name, behind the calls of `SgdStep`."""

    def __init__(self, parameters: Iterable[Tensor], training: TrainingConfig) -> None:
        super().__init__(parameters, lr=training.lr, clip=training.clip)
        made = optimizer_class(training.optimizer)
        self._optimizer = made(self.parameters, **_arguments(training, made)) if self.parameters else None

    @property
    def holder(self) -> Any:
        return self._optimizer

    def _apply(self, gradients: list[Tensor], parameters: list[Tensor]) -> None:
        assert self._optimizer is not None
        for group in self._optimizer.param_groups:
            group["lr"] = self.lr
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        for parameter in parameters:
            parameter.grad = None


def _arguments(training: TrainingConfig, kind: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """The keywords of an optimiser; raises InvalidValueError for one that it does not take."""
    known = inspect.signature(kind).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    given: dict[str, Any] = {"lr": training.lr}
    for name in ("momentum", "weight_decay"):
        value = getattr(training, name)
        if name in known or (anything and value):
            given[name] = value
        elif value:
            raise InvalidValueError(f"optimizer {training.optimizer!r} takes no {name}, got {value}; leave it out")
    for name, value in _parsed(training.optimizer_args).items():
        # Those that have options of their own are not for here.
        offered = set(known) - {"params", "lr", "momentum", "weight_decay"}
        if not anything and name not in offered | {"momentum", "weight_decay"}:
            raise InvalidValueError(
                f"optimizer {training.optimizer!r} takes no argument {name!r} in optimizer_args; {nearest(name, offered)}"
            )
        given[name] = value
    return given


def _parsed(text: str) -> Mapping[str, Any]:
    """`betas=(0.9, 0.99), eps=1e-6` as values; raises InvalidValueError for anything else."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            raise ValueError(text)
        return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError):
        raise InvalidValueError(
            f"optimizer_args must be NAME=VALUE with commas between, as in 'betas=(0.9, 0.99), eps=1e-6', got {text!r}"
        ) from None


def check_training(training: TrainingConfig) -> None:
    """Raise UnknownNameError or InvalidValueError where torch lacks the optimiser of the options, or it refuses an argument."""
    if training.optimizer == "sgd" and not training.optimizer_args:
        return
    kind = optimizer_class(training.optimizer)
    try:
        kind([torch.nn.Parameter(torch.zeros(2, 2))], **_arguments(training, kind))
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidValueError):
            raise
        raise InvalidValueError(f"optimizer {training.optimizer!r} refuses its arguments: {error}") from error


def make_step(training: TrainingConfig, leaves: Iterable[Tensor], *, steps: int | None = None) -> SgdStep | TorchStep:
    """Build the optimiser of some leaves as the options say.

    Args:
        training: The options.
        leaves: What trains.
        steps: Steps of the round, for a schedule over them; None: not known, and then only a constant rate is possible.
    """
    schedule = training.local_schedule
    if schedule != "constant" and steps is None:
        raise InvalidValueError(
            f"local_schedule={schedule!r} needs the number of steps of the round; a method with its own loop makes its"
            " optimiser with make_step(training, leaves.values(), steps=batches.steps)"
        )
    made: SgdStep | TorchStep
    if training.optimizer == "sgd" and not training.optimizer_args:
        made = SgdStep(
            leaves, lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay, clip=training.clip
        )
    else:
        made = TorchStep(leaves, training)
    if schedule != "constant" or training.local_warmup > 0:
        made.rates = (training.lr * factor(schedule, place, steps or 1, warmup=training.local_warmup) for place in count())
    made.scale = _Scale() if training.amp == "float16" else None
    return made
