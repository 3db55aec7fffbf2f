"""RunConfig and TrainingConfig: every option of a run, validated, as plain values and TOML."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from sparsekit.errors import InvalidValueError, UnknownNameError, nearest
from sparsekit_fl.options.checked import Checked, Count, Hint, NonNegative, NonNegativeCount, Positive, Share, choices
from sparsekit_fl.options.given import HOW, TRAIN, WHAT, Option
from sparsekit_fl.options.training import Schedule, factor, optimizer_defaults

HETEROGENEITY: Mapping[str, tuple[float, ...]] = {
    "low": (1.0, 1 / 2),
    "median": (1.0, 1 / 2, 1 / 4),
    "high": (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16),
}
"""Levels of system heterogeneity: what the clients' capabilities are drawn from, uniformly.

Source: Xue et al., ICDE 2025 (arXiv 2412.07216), Effect of Heterogeneity (Q3); "high" is also that of its Table I.
"""

Upload = Literal["float32", "bfloat16"]
"""What changes are sent as."""

Amp = Literal["off", "bfloat16", "float16"]
"""In which data type forward passes are computed."""

_UNSET = "the preset's, or torch's if you change the optimizer"
_SGD: Mapping[str, float] = {"lr": 0.1, "weight_decay": 0.0}

_BELONGS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "lr_step": ("lr_schedule", ("step",)),
    "lr_gamma": ("lr_schedule", ("step",)),
    "lr_end": ("lr_schedule", ("linear", "cosine")),
}
"""Option → the option without which it has no effect, and the values of that one; () is any but None."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Checked):
    """How a client trains. Each option has its meaning and its range where it is declared.

    A learning rate or a weight decay that is not given is the optimizer's own: 0.1 and 0 for sgd, and what the class of torch
    says for any other, as 0.001 and 0.01 for adamw. Without one in the class it is that of sgd.

    Raises:
        InvalidValueError: a value that is not allowed.
        UnknownNameError: torch has no such optimizer; it is looked up where a default depends on it.
    """

    local_epochs: Annotated[
        Count, Option("Passes over a client's training data per round, E in the papers.", TRAIN, preset=True, flag="epochs")
    ] = 5
    batch_size: Annotated[Count, Option("Examples per step, B in the papers.", TRAIN, preset=True)] = 20
    # A number once made, as is the weight decay.
    lr: Annotated[NonNegative, Option("Learning rate of round 1.", TRAIN, preset=True, unset=_UNSET)] = None  # type: ignore[assignment]
    momentum: Annotated[float, Field(ge=0, lt=1), Option("Momentum of SGD and RMSprop.", TRAIN, preset=True)] = 0.0
    weight_decay: Annotated[NonNegative, Option("Weight decay of the optimizer.", TRAIN, preset=True, unset=_UNSET)] = None  # type: ignore[assignment]
    clip: Annotated[Positive | None, Option("Largest norm of the gradient of a step.", TRAIN, preset=True)] = None
    optimizer: Annotated[
        str,
        Option("A client's optimizer: sgd, adam, adamw, or any other of torch.optim by name; or package.module:Class.", TRAIN),
    ] = "sgd"
    optimizer_args: Annotated[
        str, Option("Further arguments of the optimizer, as in 'betas=(0.9, 0.99), eps=1e-6'.", TRAIN, unset="its own")
    ] = ""
    amp: Annotated[
        Amp,
        Option("Automatic mixed precision of forward passes: bfloat16, float16 (with a scaled loss), or off.", TRAIN),
    ] = "off"
    local_schedule: Annotated[
        Schedule, Option("Course of the learning rate over the steps of one round of a client.", TRAIN)
    ] = "constant"
    local_warmup: Annotated[NonNegativeCount, Option("Steps at the start of each round with a growing rate.", TRAIN)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        absent = [name for name in _SGD if getattr(self, name) is None]
        if absent:
            own = {} if self.optimizer == "sgd" else optimizer_defaults(self.optimizer)
            for name in absent:
                object.__setattr__(self, name, own.get(name, _SGD[name]))

    @property
    def is_plain(self) -> bool:
        """Whether a step is θ ← θ − lr · gradient and nothing else."""
        changed = (self.momentum, self.weight_decay, self.clip, self.optimizer_args, self.local_warmup)
        off = self.optimizer == "sgd" and self.amp != "float16" and self.local_schedule == "constant"
        return off and not any(changed)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Checked):
    """Everything that decides a run, beside method, problem and clients.

    Each option has its meaning and its range where it is declared; `training` is how a client trains.

    Raises:
        InvalidValueError: a value, or a combination of values, that is not allowed.
    """

    rounds: Annotated[Count, Option("Server rounds, R in the papers.", WHAT, preset=True)]
    cohort: Annotated[
        Count, Option("Clients per round, C in the papers; at most the number of clients.", WHAT, preset=True)
    ] = 10
    training: TrainingConfig = field(default_factory=TrainingConfig)
    seed: Annotated[NonNegativeCount, Option("Seed of all random numbers.", HOW)] = 0
    eval_every: Annotated[
        Count | None,
        Option("Evaluate every N rounds, and after the last.", HOW, unset="ten times in a run, and at least every 10 rounds"),
    ] = None
    eval_global_every: Annotated[
        Count | None, Option("Score the global model too every N rounds, and after the last.", HOW, unset="after the last")
    ] = None
    eval_clients: Annotated[
        Count | None,
        Option(
            "Number of clients that are evaluated before the last round, drawn anew each time; the last evaluates all.",
            HOW,
            unset="all",
        ),
    ] = None
    device: Annotated[
        str, Option("Where clients train: cpu, cuda, cuda:0, mps, …; workers take turns on several, separated by commas.", HOW)
    ] = "cpu"
    deterministic: Annotated[
        bool, Option("On a GPU, use slower operators that give the same bits on every run, and no TF32.", HOW)
    ] = False
    capability: Annotated[
        Literal["fixed", "dynamic"],
        Option("Draw the clients' capability levels once (fixed) or every round (dynamic).", WHAT, preset=True),
    ] = "fixed"
    capability_levels: Annotated[
        Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(min_length=1)] | None,
        Hint("None keeps each client's own capability"),
        Option("Levels to draw `Capability.ratio` from, uniformly; None keeps each client's own capability."),
    ] = None
    lr_decay: Annotated[float, Field(gt=0, le=1), Option("Factor on the learning rate after every round.", TRAIN)] = 1.0
    lr_schedule: Annotated[
        Schedule, Option("Course of the learning rate over the rounds: constant, linear, cosine or step.", TRAIN)
    ] = "constant"
    lr_warmup: Annotated[NonNegativeCount, Option("Rounds at the start with a growing learning rate.", TRAIN)] = 0
    lr_step: Annotated[Count | None, Option("For step: rounds from one to the next.", TRAIN, unset="a third of all")] = None
    lr_gamma: Annotated[float, Field(gt=0, le=1), Option("For step: factor on the learning rate.", TRAIN)] = 0.1
    lr_end: Annotated[Share, Option("For linear and cosine: the last learning rate, over the first.", TRAIN)] = 0.0
    min_replies: Annotated[
        Count | None,
        Option(
            "Valid updates that a round needs, at most the cohort; with fewer it is repeated, twice at most, and then the"
            " run stops.",
            HOW,
            unset="half of its cohort, rounded up",
        ),
    ] = None
    upload: Annotated[Upload, Option("Send changes up as float32, as they are, or rounded to 16 bits, as bfloat16.", HOW)] = (
        "float32"
    )

    def __post_init__(self) -> None:
        if isinstance(self.capability_levels, list):
            object.__setattr__(self, "capability_levels", tuple(self.capability_levels))
        super().__post_init__()
        if self.eval_every is None:
            # A short run has a curve too.
            object.__setattr__(self, "eval_every", max(1, min(10, self.rounds // 10)))
        if not isinstance(self.training, TrainingConfig):
            raise InvalidValueError(f"training must be a TrainingConfig, got {type(self.training).__name__}")
        if self.min_replies is not None and self.min_replies > self.cohort:
            raise InvalidValueError(f"min_replies must be at most cohort ({self.cohort}), got {self.min_replies}")
        self._check_features()

    def _check_features(self) -> None:
        """Refuse an option that has no effect; its default passes, since a saved run has them all."""
        for choice in choices(RunConfig):
            feature, values = _BELONGS.get(choice.name, ("", ()))
            if not feature or choice.is_default(getattr(self, choice.name)):
                continue
            found = getattr(self, feature)
            if found is None or (values and found not in values):
                allowed = " " + " or ".join(map(repr, values)) if values else ""
                raise InvalidValueError(f"{choice.name} belongs to {feature}{allowed}, got {found!r}; leave it out")

    def round_factor(self, round: int) -> float:
        """Return the factor on the learning rate in a round, counted from 1: `lr_decay` times the schedule."""
        course = factor(
            self.lr_schedule,
            round - 1,
            self.rounds,
            warmup=self.lr_warmup,
            every=self.lr_step,
            gamma=self.lr_gamma,
            end=self.lr_end,
        )
        return self.lr_decay ** (round - 1) * course

    def needed_replies(self, cohort: int) -> int:
        """Number of valid updates that a round of `cohort` clients needs to count."""
        return -(-cohort // 2) if self.min_replies is None else min(self.min_replies, cohort)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` is the inverse."""
        raw = dataclasses.asdict(self)
        if self.capability_levels is not None:
            raw["capability_levels"] = list(self.capability_levels)
        return raw

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> RunConfig:
        """Read plain values.

        Raises:
            UnknownNameError: a key that is no option.
            InvalidValueError: a value that is not allowed.
        """
        values = _known(RunConfig, raw, "the run")
        if isinstance(values.get("training"), Mapping):
            values["training"] = TrainingConfig(**_known(TrainingConfig, values["training"], "training"))
        if "rounds" not in values:
            raise InvalidValueError("the run lacks 'rounds', the number of server rounds")
        return RunConfig(**values)


def _known(kind: type, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(kind)]
    for key in raw:
        if key not in names:
            raise UnknownNameError(f"unknown option {key!r} of {where}; {nearest(key, names)}")
    return dict(raw)
