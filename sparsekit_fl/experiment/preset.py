"""Preset: the settings of one experiment, as names and numbers. Reading one imports neither data nor models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from sparsekit_fl.options.config import HETEROGENEITY, RunConfig, TrainingConfig


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The settings of one experiment.

    Args:
        name: The value of `--preset`.
        dataset: Name in the registry of data sets, or `package.module:factory`.
        model: Name in the registry of models, or `package.module:factory`.
        clients: Number of clients, K.
        cohort: Size of the cohort, C.
        rounds: Number of rounds, R.
        training: Options of a client's training.
        partition: Name in the registry of partitions; None takes natural for data with owners, else pathological.
        options: Keywords for the partition.
        capability: Draw the clients' levels in every round, or once.
        capability_levels: The levels to draw from.
        source: Origin of the numbers.
    """

    name: str
    dataset: str
    model: str
    clients: int
    cohort: int = 10
    rounds: int = 100
    training: TrainingConfig = field(default_factory=TrainingConfig)
    partition: str | None = "pathological"
    options: Mapping[str, object] = field(default_factory=dict)
    capability: Literal["fixed", "dynamic"] = "dynamic"
    capability_levels: tuple[float, ...] = HETEROGENEITY["high"]
    source: str = ""

    def config(self, given: Mapping[str, Any], clients: int) -> RunConfig:
        """Return the options of a run.

        Args:
            given: Options of `RunConfig` and of its `TrainingConfig` by name, in place of the preset's. Another optimizer comes
                with its own learning rate, momentum and weight decay.
            clients: Number of clients.
        """
        trains = {field.name for field in fields(TrainingConfig)}
        trained = {name: value for name, value in given.items() if name in trains}
        if trained.get("optimizer", self.training.optimizer) == self.training.optimizer:
            training = replace(self.training, **trained)
        else:
            # The preset's rate, momentum and decay were chosen for its own optimizer.
            kept = {
                name: getattr(self.training, name) for name in trains - {"lr", "momentum", "weight_decay", "optimizer_args"}
            }
            training = TrainingConfig(**kept | trained)
        own: dict[str, Any] = {
            "rounds": self.rounds,
            "cohort": min(self.cohort, clients),
            "capability": self.capability,
            "capability_levels": self.capability_levels,
        }
        return RunConfig(training=training, **own | {name: value for name, value in given.items() if name not in trains})
