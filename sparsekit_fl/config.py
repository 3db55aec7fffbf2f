"""RunConfig and TrainingConfig: every option of a run, validated, as plain values and TOML."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sparsekit.errors import InvalidValueError, UnknownNameError, nearest

__all__ = ["HETEROGENEITY", "RunConfig", "TrainingConfig"]

HETEROGENEITY: Mapping[str, tuple[float, ...]] = {
    "low": (1.0, 1 / 2),
    "median": (1.0, 1 / 2, 1 / 4),
    "high": (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16),
}
"""Levels of system heterogeneity: what the clients' capabilities are drawn from, uniformly.

Source: Xue et al., ICDE 2025 (arXiv 2412.07216), Effect of Heterogeneity (Q3); "high" is also that of its Table I.
"""


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
        clients_per_round: Size of the cohort, C; at most the number of clients.
        training: How a client trains.
        seed: Of all random numbers.
        eval_every: Evaluate all clients each so many rounds, and after the last.
        device: Where clients train: "cpu", "cuda", "cuda:0", …
        capability: "fixed": each client's level is drawn once; "dynamic": redrawn every round.
        capability_levels: Levels to draw `Capability.ratio` from, uniformly; None keeps each client's own capability.
        lr_decay: Factor on the learning rate after every round, in (0, 1].
    """

    rounds: int
    clients_per_round: int = 10
    training: TrainingConfig = field(default_factory=TrainingConfig)
    seed: int = 0
    eval_every: int = 10
    device: str = "cpu"
    capability: Literal["fixed", "dynamic"] = "fixed"
    capability_levels: tuple[float, ...] | None = None
    lr_decay: float = 1.0

    def __post_init__(self) -> None:
        _integer("rounds", self.rounds, 1)
        _integer("clients_per_round", self.clients_per_round, 1)
        _integer("seed", self.seed, 0)
        _integer("eval_every", self.eval_every, 1)
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
