"""Presets: the experiments of the paper's Table I and a quick one, from the rows of `presets.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Any

from sparsekit.errors import UnknownNameError, nearest
from sparsekit_fl.datasets import datasets
from sparsekit_fl.experiment.preset import Preset
from sparsekit_fl.options.config import TrainingConfig

DEFAULT = "digits"


def _preset(name: str, row: dict[str, Any]) -> Preset:
    return Preset(name=name, training=TrainingConfig(**row.pop("training")), **row)


PRESETS: Mapping[str, Preset] = {
    name: _preset(name, row)
    for name, row in tomllib.loads(files(__package__).joinpath("presets.toml").read_text(encoding="utf-8")).items()
}


def preset_for(*, preset: str | None = None, dataset: str | None = None) -> Preset:
    """Return the settings that a run starts from.

    Args:
        preset: Name of a preset; it decides everything that the caller does not change.
        dataset: Name of a data set, which without a preset selects its own. For a factory or a plug-in: the quick settings
            with the partition that the data suggest.

    Returns:
        The preset; with neither argument the quick one.

    Raises:
        UnknownNameError: no preset, or no data set, of that name.
    """
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
    return replace(
        PRESETS[DEFAULT], name="custom", dataset=dataset, partition=None, options={}, source="ours: the quick settings"
    )
