"""Presets: settings of the experiments in the paper's Table I, and of a quick one. Their values are in `presets.toml`.

Reading a preset imports neither data nor models.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.resources import files
from typing import Any

from sparsekit.errors import UnknownNameError, nearest
from sparsekit_fl.config import HETEROGENEITY, CapabilityOf, RunConfig, TrainingConfig

DEFAULT = "digits"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Settings of one experiment. Capabilities are drawn from the levels of high heterogeneity, again in every round.

    Data set, model and partition are names, or `package.module:name`. If `partition` is None, it is natural for data with
    owners, else pathological; `options` are its keywords. With capabilities in "units", as in the authors' released code,
    `flops_paper` gives the FLOPs of Table I.
    """

    name: str
    dataset: str
    model: str
    clients: int
    cohort: int = 10
    rounds: int = 100
    capability_of: CapabilityOf = "units"
    training: TrainingConfig = field(default_factory=TrainingConfig)
    partition: str | None = "pathological"
    options: Mapping[str, object] = field(default_factory=dict)

    def config(self, given: Mapping[str, Any], clients: int) -> RunConfig:
        """Return the options of a run with `clients` clients; `given` has options that replace the preset's, by name.

        An optimizer other than the preset's has its own default learning rate, momentum and weight decay.
        """
        kept = asdict(self.training)
        if given.get("optimizer", self.training.optimizer) != self.training.optimizer:
            # These values of the preset were chosen for its optimizer.
            for name in ("lr", "momentum", "weight_decay"):
                del kept[name]
        own: dict[str, Any] = {
            "rounds": self.rounds,
            "cohort": min(self.cohort, clients),
            "capability_of": self.capability_of,
            "redraw_capability": True,
            "capability_levels": HETEROGENEITY["high"],
        }
        trains = {field.name for field in fields(TrainingConfig)}
        training = TrainingConfig(**kept | {name: value for name, value in given.items() if name in trains})
        return RunConfig(training=training, **own | {name: value for name, value in given.items() if name not in trains})


PRESETS: Mapping[str, Preset] = {
    name: Preset(**row | {"name": name, "training": TrainingConfig(**row["training"])})
    for name, row in tomllib.loads(files(__package__).joinpath("presets.toml").read_text(encoding="utf-8")).items()
}


def preset_for(*, preset: str | None = None, dataset: str | None = None) -> Preset:
    """Return the settings that a run starts from.

    Args:
        preset: Name of a preset; None: the preset of the data set, or the quick preset.
        dataset: Name of a data set, which replaces the preset's. Without `preset`, it selects the preset of that name, or for a
            factory or a plug-in the quick settings, with the partition that suits the data.

    Raises:
        UnknownNameError: no preset, or no data set, of that name.
    """
    from sparsekit_fl.problem.datasets import datasets  # imported here, since help texts need no torch

    if preset is not None:
        if preset not in PRESETS:
            raise UnknownNameError(f"unknown preset {preset!r}; {nearest(preset, PRESETS)}")
        found = PRESETS[preset]
        return found if dataset is None else replace(found, dataset=dataset)
    if dataset is None:
        return PRESETS[DEFAULT]
    if dataset in PRESETS:
        return PRESETS[dataset]
    if ":" not in dataset and dataset not in datasets:
        raise UnknownNameError(f"unknown dataset {dataset!r}; {nearest(dataset, datasets)}, or package.module:factory")
    return replace(PRESETS[DEFAULT], name="custom", dataset=dataset, partition=None, options={})
