"""RunConfig and TrainingConfig: every option of a run; and optimizers by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit.registry import load_object
from sparsekit_fl.options import Checked, Count, NonNegative, NonNegativeCount, Positive, option

if TYPE_CHECKING:
    import torch

HETEROGENEITY: Mapping[str, tuple[float, ...]] = {
    "low": (1.0, 1 / 2),
    "median": (1.0, 1 / 2, 1 / 4),
    "high": (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16),
}
"""Levels of system heterogeneity; capabilities of clients are drawn uniformly from one of them.

Source: Xue et al., ICDE 2025 (arXiv 2412.07216), Effect of Heterogeneity (Q3); "high" is also used in its Table I.
"""

Amp = Literal["off", "bfloat16"]
Upload = Literal["float32", "bfloat16"]
CapabilityOf = Literal["flops", "units"]
Deploy = Literal["last", "best"]
Factor = Annotated[float, Field(gt=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]

_SGD: Mapping[str, float] = {"lr": 0.1, "weight_decay": 0.0}


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Checked):
    """Set how each client trains in a round.

    Pass it as `RunConfig(training=...)`. A client starts each round with a fresh optimizer, makes
    `local_epochs` passes over its training data, and sends what changed to the server.

    Raises:
        InvalidValueError: a value that is not allowed.
        UnknownNameError: torch has no such optimizer. It is looked up if a default depends on it.

    Example:
        >>> import sparsekit_fl as fl
        >>> training = fl.TrainingConfig(local_epochs=1, optimizer="adamw")
        >>> training.lr, training.batch_size
        (0.001, 20)
    """

    local_epochs: Count = option(
        5,
        "Passes over a client's training data per round. More passes train longer between two averages, and let the "
        "clients drift further apart. Default: 5.",
    )
    batch_size: Count = option(20, "Examples per step. The last batch of a pass may be smaller. Default: 20.")
    # A number once made, as is the weight decay.
    lr: NonNegative = option(  # type: ignore[assignment]
        None,
        "Learning rate of the first round. The option lr_decay lowers it over the rounds. Default: 0.1 for SGD, the "
        "default of torch for another optimizer.",
    )
    momentum: Momentum = option(0.0, "Momentum of SGD and RMSprop, in [0, 1). Other optimizers refuse it. Default: 0.")
    weight_decay: NonNegative = option(  # type: ignore[assignment]
        None, "Weight decay of the optimizer. Default: 0 for SGD, the default of torch for another optimizer."
    )
    clip: Positive | None = option(
        None,
        "Largest norm of the gradient in a step. A larger gradient is scaled down to it. None does not clip. Default: None.",
    )
    optimizer: str = option(
        "sgd",
        "Optimizer of each client: sgd, adam, adamw, another of torch.optim, or package.module:Class. Its state is "
        "dropped after each round. Default: sgd.",
    )
    amp: Amp = option(
        "off", "Data type of forward passes: off (float32) or bfloat16. Weights, updates and scores stay float32. Default: off."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        absent = [name for name in _SGD if getattr(self, name) is None]
        # A few optimizers take the learning rate as a tensor too, but none has one as a default.
        own = inspect.signature(optimizer_class(self.optimizer)).parameters if absent and self.optimizer != "sgd" else {}
        for name in absent:
            object.__setattr__(self, name, float(own[name].default) if name in own else _SGD[name])

    @cached_property
    def is_plain(self) -> bool:
        """Whether a step is θ ← θ − lr · gradient and nothing else."""
        return self.optimizer == "sgd" and not any((self.momentum, self.weight_decay, self.clip))


@dataclass(frozen=True, kw_only=True)
class RunConfig(Checked):
    """Set the number of rounds, the clients of each round, their training and their scores.

    Pass it to `fl.run(method, problem, clients, config)`. Method, model, data and configuration
    decide every number of a result; the engine and the number of workers change the speed only.

    Raises:
        InvalidValueError: a value, or a combination of values, that is not allowed.

    Example:
        >>> import sparsekit_fl as fl
        >>> config = fl.RunConfig(rounds=100, cohort=10, training=fl.TrainingConfig(lr=0.05))
        >>> config.eval_every, config.needed_replies(cohort=10)
        (10, 5)
    """

    rounds: Count = field(
        metadata={"description": "Number of rounds. In each, some clients train, and the server combines their updates."}
    )
    cohort: Count = option(10, "Clients per round. It must not exceed the number of clients. Default: 10.")
    training: TrainingConfig = field(
        default_factory=TrainingConfig,
        metadata={"description": "How each client trains. Default: `TrainingConfig()`, 5 local epochs of SGD."},
    )
    seed: NonNegativeCount = option(
        0, "Seed of all random numbers. Equal seeds give equal results on every engine. Default: 0."
    )
    eval_every: Count | None = option(
        None,
        "Rounds between two scores of the personal models. They are also scored after the last round. Default: a tenth of "
        "all rounds, but at most 10.",
    )
    eval_global_every: Count | None = option(
        None,
        "Rounds between two scores of the global model. It is also scored after the last round. None scores it after the "
        "last round only. Default: None.",
    )
    eval_clients: Count | None = option(
        None,
        "Clients scored before the last round, drawn again each time. Fewer make scores faster and noisier. The last "
        "round always scores all. None scores all every time. Default: None.",
    )
    device: str = option(
        "cpu",
        "Device that clients train on: cpu, cuda, cuda:0 or mps. Separate several by commas; workers share them. Default: cpu.",
    )
    deterministic: bool = option(
        False,
        "Repeat results exactly on a GPU. Its operators are slower, and TF32 is off. The CPU always repeats them. "
        "Default: false.",
    )
    capability_of: CapabilityOf = option(
        "flops",
        "Unit of capabilities and ratios. flops: shares of the FLOPs of a step of the whole model; "
        "every layer keeps the largest equal share of its units that fits, so that a device of capability 1/4, at a "
        "quarter of the speed, needs as long as a full one. units: the units of each layer, as HeteroFL, FedRolex and "
        "FjORD define it. A quarter of the units costs about a sixteenth of the FLOPs. Default: flops.",
    )
    capability_levels: tuple[Factor, ...] | None = option(
        None,
        "Capabilities to draw from, each in (0, 1]. Every level is equally likely. None keeps the capability that each "
        "client brings along. Default: None.",
    )
    redraw_capability: bool = option(
        False, "Draw the capability of each client again in every round, and not once. Default: false."
    )
    deploy: Deploy = option(
        "last",
        "Model that each client is scored with. last: what the method deploys after the last round, such as the global "
        "model of FedAvg, or the last personal model of FedLPS. best: for every method alike, the model with the best "
        "score on the client's own validation data among those that the client trained itself; its batch norm statistics "
        "are computed again from its training data. Default: last.",
    )
    lr_decay: Factor = option(1.0, "Factor on the learning rate after each round, in (0, 1]. Default: 1.")
    min_replies: Count | None = option(
        None,
        "Valid updates that a round needs. With fewer, the run stops, and a resumed run repeats the round. None takes "
        "half of the cohort, rounded up. Default: None.",
    )
    upload: Upload = option(
        "float32",
        "Data type of updates: float32, or bfloat16, which halves the bytes sent up and rounds the changes. Default: float32.",
    )

    def __post_init__(self) -> None:
        if isinstance(self.capability_levels, list):
            object.__setattr__(self, "capability_levels", tuple(self.capability_levels))
        super().__post_init__()
        if self.eval_every is None:
            object.__setattr__(self, "eval_every", max(1, min(10, self.rounds // 10)))
        if not isinstance(self.training, TrainingConfig):
            raise InvalidValueError(f"training must be a TrainingConfig, got {type(self.training).__name__}")
        if self.min_replies is not None and self.min_replies > self.cohort:
            raise InvalidValueError(f"min_replies must be at most cohort ({self.cohort}), got {self.min_replies}")

    def training_in(self, round: int) -> TrainingConfig:
        """Return how clients train in a round: with its learning rate. Round 0 is as round 1."""
        return replace(self.training, lr=self.training.lr * self.lr_decay ** max(round - 1, 0))

    def needed_replies(self, cohort: int) -> int:
        """Return the number of valid updates that a round of `cohort` clients needs to count."""
        return -(-cohort // 2) if self.min_replies is None else min(self.min_replies, cohort)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; `from_dict` is the inverse."""
        return dict(TypeAdapter(RunConfig).dump_python(self, mode="json"))

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> RunConfig:
        """Read what `to_dict` returned; raises ValueError if it is not that."""
        return TypeAdapter(RunConfig).validate_python(raw)


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return an optimizer by its name in `torch.optim`, in any case, or as `package.module:Class`."""
    import torch  # here: help texts need no torch

    base, kinds = torch.optim.Optimizer, {key: kind for key, kind in vars(torch.optim).items() if isinstance(kind, type)}
    known = {key.lower(): kind for key, kind in kinds.items() if issubclass(kind, base) and kind is not base}
    found = load_object(name) if ":" in name else known.get(name.lower())
    if found is None:
        raise UnknownNameError(f"unknown optimizer {name!r}; {nearest(name.lower(), known)}, or package.module:Class")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise InvalidValueError(f"optimizer {name!r} must be a class that inherits torch.optim.Optimizer, got {found!r}")
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is not None:
        raise InvalidValueError(f"optimizer {name!r} needs a closure that computes the loss again; choose another")
    return found
