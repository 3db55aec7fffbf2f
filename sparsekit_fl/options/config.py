"""RunConfig and TrainingConfig: every option of a run, validated, as plain values and TOML."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from sparsekit.errors import InvalidValueError, UnknownNameError, nearest

__all__ = ["AGGREGATIONS", "HETEROGENEITY", "UPLOADS", "Aggregation", "RunConfig", "TrainingConfig", "Upload"]

HETEROGENEITY: Mapping[str, tuple[float, ...]] = {
    "low": (1.0, 1 / 2),
    "median": (1.0, 1 / 2, 1 / 4),
    "high": (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16),
}
"""Levels of system heterogeneity: what the clients' capabilities are drawn from, uniformly.

Source: Xue et al., ICDE 2025 (arXiv 2412.07216), Effect of Heterogeneity (Q3); "high" is also that of its Table I.
"""


Aggregation = Literal["mean", "trimmed-mean", "median", "norm-clipped"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
"""Names of the rules by which the server combines changes."""

Upload = Literal["float32", "bfloat16"]
UPLOADS: tuple[str, ...] = get_args(Upload)
"""What changes are sent as."""

_LATER = (
    "eval_clients",
    "aggregation",
    "trim_share",
    "clip_norm",
    "dp_clip",
    "dp_noise",
    "dp_delta",
    "dp_noise_seed",
    "upload",
)


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _integer(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise InvalidValueError(f"{name} must be an integer >= {low}, got {value!r}")


def _number(name: str, value: object, low: float, *, open_low: bool = False, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidValueError(f"{name} must be a finite number, got {value!r}")
    if value < low or value > high or (open_low and value == low):
        bounds = f"{'>' if open_low else '>='} {low:g}" + (f" and <= {high:g}" if math.isfinite(high) else "")
        raise InvalidValueError(f"{name} must be {bounds}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a client trains.

    Args:
        local_epochs: Passes over the client's training data per round, E in the papers.
        batch_size: Examples per step, B in the papers.
        lr: Learning rate of round 1.
        momentum: Of SGD, in [0, 1).
        weight_decay: Of SGD.
        clip: Largest norm of the gradient of a step; None does not clip.
    """

    local_epochs: int = 5
    batch_size: int = 20
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None

    def __post_init__(self) -> None:
        _integer("local_epochs", self.local_epochs, 1)
        _integer("batch_size", self.batch_size, 1)
        _number("lr", self.lr, 0.0)
        _number("momentum", self.momentum, 0.0, high=0.999999)
        _number("weight_decay", self.weight_decay, 0.0)
        if self.clip is not None:
            _number("clip", self.clip, 0.0, open_low=True)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a run, beside method, problem and clients.

    Args:
        rounds: Server rounds, R in the papers.
        cohort: Size of the cohort, C; at most the number of clients.
        training: How a client trains.
        seed: Of all random numbers.
        eval_every: Evaluate clients each so many rounds, and after the last.
        eval_clients: How many are evaluated before the last round, drawn for each; None, or more than there are: all. After
            the last round it is always all.
        device: Where clients train: "cpu", "cuda", "cuda:0", …
        capability: "fixed": each client's level is drawn once; "dynamic": redrawn every round.
        capability_levels: Levels to draw `Capability.ratio` from, uniformly; None keeps each client's own capability.
        lr_decay: Factor on the learning rate after every round, in (0, 1].
        min_replies: Valid updates that a round needs to count, in [1, cohort]; None takes half of the cohort,
            rounded up. A round with fewer is repeated, at most twice, and then the run stops; see `run`.
        aggregation: How changes are combined: by the method's own mean, or by a rule that bears clients who lie; see
            `policies.robust`.
        trim_share: For "trimmed-mean": part of the values that goes at each end, in [0, 0.5).
        clip_norm: For "norm-clipped": longer changes are scaled to this norm; None takes the round's median norm.
        dp_clip: Client-level differential privacy: largest norm of a client's change; see `privacy`. None: no privacy.
        dp_noise: Noise multiplier, the noise's standard deviation over `dp_clip`; given with it.
        dp_delta: δ; None takes 1e-5, or K^-1.1 for K clients where that is less.
        dp_noise_seed: Of the noise, for runs that must repeat; it is written into the result, and whoever knows it can take
            the noise off. None draws a secret one from the operating system. Clients get neither.
        upload: "bfloat16" rounds the floating-point changes that go up to 16 bits; "float32" sends them as they are.
    """

    rounds: int
    cohort: int = 10
    training: TrainingConfig = field(default_factory=TrainingConfig)
    seed: int = 0
    eval_every: int = 10
    eval_clients: int | None = None
    device: str = "cpu"
    capability: Literal["fixed", "dynamic"] = "fixed"
    capability_levels: tuple[float, ...] | None = None
    lr_decay: float = 1.0
    min_replies: int | None = None
    aggregation: Aggregation = "mean"
    trim_share: float = 0.2
    clip_norm: float | None = None
    dp_clip: float | None = None
    dp_noise: float | None = None
    dp_delta: float | None = None
    dp_noise_seed: int | None = None
    upload: Upload = "float32"

    def __post_init__(self) -> None:
        _integer("rounds", self.rounds, 1)
        _integer("cohort", self.cohort, 1)
        _integer("seed", self.seed, 0)
        _integer("eval_every", self.eval_every, 1)
        if self.eval_clients is not None:
            _integer("eval_clients", self.eval_clients, 1)
        _number("lr_decay", self.lr_decay, 0.0, open_low=True, high=1.0)
        if not isinstance(self.training, TrainingConfig):
            raise InvalidValueError(f"training must be a TrainingConfig, got {type(self.training).__name__}")
        if self.capability not in ("fixed", "dynamic"):
            raise InvalidValueError(f"capability must be 'fixed' or 'dynamic', got {self.capability!r}")
        if self.capability_levels is not None:
            levels = tuple(self.capability_levels)
            if not levels:
                raise InvalidValueError("capability_levels must not be empty; pass None to keep each client's own capability")
            for level in levels:
                _number("a capability level", level, 0.0, open_low=True, high=1.0)
            object.__setattr__(self, "capability_levels", levels)
        if self.min_replies is not None:
            _integer("min_replies", self.min_replies, 1)
            if self.min_replies > self.cohort:
                raise InvalidValueError(f"min_replies must be at most cohort ({self.cohort}), got {self.min_replies}")

        _choice("upload", self.upload, UPLOADS)
        self._check_aggregation()
        self._check_privacy()

    def _check_aggregation(self) -> None:
        _choice("aggregation", self.aggregation, AGGREGATIONS)
        _number("trim_share", self.trim_share, 0.0)
        if self.trim_share >= 0.5:
            raise InvalidValueError(f"trim_share must be in [0, 0.5), got {self.trim_share!r}; it goes at each end")
        if self.clip_norm is not None:
            _number("clip_norm", self.clip_norm, 0.0, open_low=True)
            if self.aggregation != "norm-clipped":
                raise InvalidValueError(f"clip_norm belongs to aggregation 'norm-clipped', got {self.aggregation!r}")

    def _check_privacy(self) -> None:
        if self.dp_clip is None:
            for name in ("dp_noise", "dp_delta", "dp_noise_seed"):
                if getattr(self, name) is not None:
                    raise InvalidValueError(f"{name} needs dp_clip, the largest norm of a client's change")
            return
        _number("dp_clip", self.dp_clip, 0.0, open_low=True)
        if self.dp_noise is None:
            raise InvalidValueError("dp_clip needs dp_noise, the noise multiplier; aggregation 'norm-clipped' clips alone")
        _number("dp_noise", self.dp_noise, 0.0, open_low=True)
        if self.dp_delta is not None:
            _number("dp_delta", self.dp_delta, 0.0, open_low=True)
            if self.dp_delta >= 1.0:
                raise InvalidValueError(f"dp_delta must be in (0, 1), got {self.dp_delta!r}")
        if self.dp_noise_seed is not None:
            _integer("dp_noise_seed", self.dp_noise_seed, 0)
        if self.aggregation != "mean":
            raise InvalidValueError(
                f"dp_clip needs aggregation 'mean', got {self.aggregation!r}: one client can move a trimmed mean or a median by"
                " more than the noise hides, and dp_clip clips norms itself"
            )

    def needed_replies(self, cohort: int) -> int:
        """How many valid updates a round of `cohort` clients needs to count."""
        return -(-cohort // 2) if self.min_replies is None else min(self.min_replies, cohort)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` is the inverse."""
        raw = dataclasses.asdict(self)
        if self.capability_levels is not None:
            raw["capability_levels"] = list(self.capability_levels)
        # Left out while they are what they were before there were such options, so that older runs can be resumed.
        return {name: value for name, value in raw.items() if name not in _LATER or value != getattr(RunConfig, name)}

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
        if isinstance(values.get("capability_levels"), list):
            values["capability_levels"] = tuple(values["capability_levels"])
        if "rounds" not in values:
            raise InvalidValueError("the run lacks 'rounds', the number of server rounds")
        return RunConfig(**values)

    @staticmethod
    def from_toml(path: Path | str) -> RunConfig:
        """Read a TOML file: the options at its top level, those of training in a table `[training]`.

        Raises:
            InvalidValueError: not TOML, or a value that is not allowed.
            UnknownNameError: a key that is no option.
        """
        try:
            raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise InvalidValueError(f"{path} is not TOML: {error}") from error
        return RunConfig.from_dict(raw)


def _known(kind: type, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(kind)]
    for key in raw:
        if key not in names:
            raise UnknownNameError(f"unknown option {key!r} of {where}; {nearest(key, names)}")
    return dict(raw)
