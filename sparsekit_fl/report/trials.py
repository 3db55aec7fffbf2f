"""Trials and sections: what a folder of finished runs holds, grouped into comparisons that may stand in one table.

A trial is one method under one seed at one level of heterogeneity; a section is all trials that differ in nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsekit.errors import DataError
from sparsekit_fl.options.config import HETEROGENEITY, current_names
from sparsekit_fl.report.table import read_result
from sparsekit_fl.results.scoring import complete_result, lacks

__all__ = ["TRIAL_FILES", "Level", "Section", "Trial", "collect", "collect_all", "level_of", "sections_of", "trial_file"]

TRIAL_FILES = ("trial.json", "cell.json")
"""Beside a run's own files: what was to be run, and the error of a run that failed. The second is what version 0.1 wrote."""

# What may differ between the trials of a section: the axes of the comparison, and what changes no number.
_AXES = ("seed", "capability_levels", "eval_every", "device")
_DECIDED = "capability"
_LACKING = "lack_classes"


@dataclass(frozen=True)
class Level:
    """Heterogeneity of the clients, in device and data.

    Args:
        heterogeneity: A name in `options.config.HETEROGENEITY`; None for other capabilities.
        lack_classes: Number of classes that every client lacks; None for other partitions.
    """

    heterogeneity: str | None = None
    lack_classes: int | None = None

    @property
    def order(self) -> tuple[int, int]:
        """From less to more different clients."""
        names = [None, *HETEROGENEITY]
        return names.index(self.heterogeneity), -1 if self.lack_classes is None else self.lack_classes


def level_of(config: Mapping[str, Any]) -> Level:
    """Return the level of a run, from the `config` of its result."""
    drawn = tuple(config.get("capability_levels") or ())
    heterogeneity = next((name for name, levels in HETEROGENEITY.items() if levels == drawn), None)
    return Level(heterogeneity, config.get("experiment", {}).get("partition_options", {}).get("lack_classes"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """One run of a comparison.

    Args:
        method: Name of the method.
        seed: Seed of the run.
        config: As in `result.json`; empty where the run could not even be set up.
        policies: As in `result.json`.
        result: As in `result.json`; None for a run that is not finished.
        error: Message of the error that ended the run; None where it is finished or only interrupted.
    """

    method: str
    seed: int
    config: Mapping[str, Any]
    policies: Mapping[str, str] = field(default_factory=dict)
    result: Mapping[str, Any] | None = None
    error: str | None = None

    @property
    def level(self) -> Level:
        """Level of heterogeneity."""
        return level_of(self.config)

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on its numbers: that of the method, and what an older version did not count."""
        if self.result is None:
            return ()
        return tuple(filter(None, (str(self.result.get("note", "")), lacks(self.result))))

    @staticmethod
    def of(saved: Mapping[str, Any]) -> Trial:
        """Read a trial from the content of `result.json`, or of a `trial.json`, which has no "final"."""
        config = current_names(saved.get("config", {}))
        return Trial(
            method=str(saved["method"]),
            seed=int(saved["seed"]),
            config=config,
            policies=saved.get("policies", {}),
            result=complete_result(saved) if "final" in saved else None,
            error=saved.get("error"),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Section:
    """Trials under one protocol.

    Args:
        title: Model, data set and settings, in words.
        trials: Trials of all methods, seeds and levels; at least one.
        methods: Names of the methods, in the order of tables.
    """

    title: str
    trials: tuple[Trial, ...]
    methods: tuple[str, ...]

    @property
    def slug(self) -> str:
        """The title as part of a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    @property
    def dataset(self) -> str:
        """Name of the data set; empty where it is not known."""
        return str(self.trials[0].config.get("experiment", {}).get("dataset", ""))

    @property
    def finished(self) -> tuple[Trial, ...]:
        """Trials with a result."""
        return tuple(trial for trial in self.trials if trial.result is not None)

    @property
    def failed(self) -> tuple[Trial, ...]:
        """Trials that ended with an error."""
        return tuple(trial for trial in self.trials if trial.error is not None)

    @property
    def levels(self) -> tuple[Level, ...]:
        """Levels that occur, from less to more different clients."""
        return tuple(sorted({trial.level for trial in self.finished}, key=lambda level: level.order))

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds that occur."""
        return tuple(sorted({trial.seed for trial in self.finished}))

    def level_text(self, level: Level) -> str:
        """Say how a level differs from the others of this section; empty where there is one."""
        levels = {trial.level for trial in self.trials if trial.config}
        parts = [
            f"heterogeneity {level.heterogeneity or 'other'}" if len({each.heterogeneity for each in levels}) > 1 else "",
            f"lacks {level.lack_classes}" if len({each.lack_classes for each in levels}) > 1 else "",
        ]
        return ", ".join(filter(None, parts))

    def name_of(self, trial: Trial) -> str:
        """Join method, level and seed of a trial."""
        level = self.level_text(trial.level) if trial.config else ""
        return ", ".join(filter(None, (trial.method, level, f"seed {trial.seed}")))

    def of(self, method: str, level: Level) -> list[Trial]:
        """Return the finished trials of a method at a level, by seed."""
        found = [trial for trial in self.finished if trial.method == method and trial.level == level]
        return sorted(found, key=lambda trial: trial.seed)


def trial_file(folder: Path) -> Path | None:
    """Find the file of a trial that is not finished, under its name of today or of version 0.1."""
    return next((folder / name for name in TRIAL_FILES if (folder / name).exists()), None)


def collect(folder: Path | str) -> list[Trial]:
    """Read all trials in a folder: its own result, those of its subfolders, and results under other names.

    Args:
        folder: Folder of a run, of a comparison, or of copies of `result.json` under names of their own.

    Raises:
        DataError: no such folder, a file that should be a result and is none, or nothing at all.
    """
    root = Path(folder)
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; pass the --out folder of `compare`, or of a finished run")
    own = ("result.json", *TRIAL_FILES)
    copies = [_copy(path) for path in sorted(root.glob("*.json")) if path.name not in own]
    homes = {path.parent for name in own for path in root.rglob(name)}
    found = [*filter(None, copies), *(_trial(home) for home in sorted(homes))]
    if not found:
        raise DataError(f"{root} holds no result; pass the --out folder of `compare`, or of a finished run")
    return found


def collect_all(folders: Sequence[Path | str]) -> list[Trial]:
    """Read all trials in several folders; a run that is in two of them counts once.

    Args:
        folders: As in `collect`.

    Raises:
        DataError: as in `collect`, or two folders hold different results of one method, seed and setting.
    """
    if len(folders) == 1:
        return collect(folders[0])
    kept: dict[str, tuple[Trial, Path | str]] = {}
    for folder in folders:
        for trial in collect(folder):
            key = _key(
                {"method": trial.method, "seed": trial.seed, "level": str(trial.level), "config": _protocol(trial.config)}
            )
            other, where = kept.setdefault(key, (trial, folder))
            if other is not trial and other.result != trial.result:
                raise DataError(
                    f"{trial.method}, seed {trial.seed}, has one result in {where} and another in {folder}; leave one out"
                )
    return [trial for trial, _ in kept.values()]


def _copy(path: Path) -> Trial | None:
    """Read a result under another name; None for any other JSON file."""
    try:
        return Trial.of(read_result(path))
    except DataError:
        return None


def _trial(home: Path) -> Trial:
    path = trial_file(home)
    if path is None or (home / "result.json").exists():
        return Trial.of(read_result(home))
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return Trial.of({name: raw[name] for name in ("method", "seed", "config", "policies")} | {"error": raw.get("error")})
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is damaged: {error}; remove it") from error


def sections_of(trials: Iterable[Trial], *, order: Sequence[str] = ()) -> list[Section]:
    """Group trials by everything that must be equal in one table.

    Args:
        trials: Finished and failed ones.
        order: Methods in the order of tables; others follow as they first appear.
    """
    groups = _groups(trials)
    sections = []
    for title, members in zip(_titles([members[0].config for members in groups]), groups, strict=True):
        present = dict.fromkeys(trial.method for trial in members)
        methods = list(dict.fromkeys([*(name for name in order if name in present), *present]))
        places = {name: place for place, name in enumerate(methods)}
        ranks = {id(trial): (trial.level.order, trial.seed, places[trial.method]) for trial in members}
        ranked = sorted(members, key=lambda trial, ranks=ranks: ranks[id(trial)])  # type: ignore[misc]
        sections.append(Section(title=title, trials=tuple(ranked), methods=tuple(methods)))
    return sections


def _groups(trials: Iterable[Trial]) -> list[list[Trial]]:
    groups: dict[str, list[Trial]] = {}
    # What decides an option itself, and what failed before it had a configuration, joins a group of the others.
    for trial in sorted(trials, key=lambda trial: 2 if not trial.config else _DECIDED in trial.policies):
        if not trial.config:
            key = next(iter(groups), "")
        elif _DECIDED in trial.policies:
            key = _key({**_protocol(trial.config), _DECIDED: None})
            key = next((other for other in groups if _key({**json.loads(other), _DECIDED: None}) == key), key)
        else:
            key = _key(_protocol(trial.config))
        groups.setdefault(key, []).append(trial)
    return list(groups.values())


def _key(protocol: Mapping[str, Any]) -> str:
    return json.dumps(protocol, sort_keys=True)


def _protocol(config: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the axes of a comparison from a configuration, and options that were not used: older results lack them."""
    kept = {name: value for name, value in config.items() if name not in _AXES and value is not None}
    level = level_of(config)
    if level.heterogeneity is None:
        kept["capability_levels"] = config.get("capability_levels")
    if level.lack_classes is not None:
        kept["experiment"] = {**config["experiment"], "partition_options": _LACKING}
    return kept


def _titles(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one title per section; equal ones are told apart by the settings that differ."""
    plain = [_title(config) for config in configs]
    settings = [_flat(_protocol(config)) if config else {} for config in configs]
    titles = []
    for title, own in zip(plain, settings, strict=True):
        others = [other for name, other in zip(plain, settings, strict=True) if name == title]
        names = sorted({name for other in others for name in other if len({str(each.get(name)) for each in others}) > 1})
        titles.append(", ".join([title, *(_setting(name, own[name]) for name in names if own.get(name) is not None)]))
    return titles


def _setting(name: str, value: Any) -> str:
    """For example `lr 0.1`, from the path `training.lr`."""
    # What `_protocol` puts where the number of classes is an axis.
    return "clients lack classes" if value == _LACKING else f"{name.rpartition('.')[2].replace('_', ' ')} {value}"


def _flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Flatten nested settings: `{"a": {"b": 1}}` becomes `{"a.b": 1}`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found.update(_flat(value, f"{path}{name}.") if isinstance(value, Mapping) else {path + name: value})
    return found


def _counted(number: int, what: str) -> str:
    """For example `1 round` and `2 rounds`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _title(config: Mapping[str, Any]) -> str:
    about = config.get("experiment", {})
    parts = [
        f"{about['model']} on {about['dataset']}" if {"model", "dataset"} <= set(about) else "runs",
        _counted(about["clients"], "client") if "clients" in about else "",
        _counted(config["rounds"], "round") if "rounds" in config else "",
    ]
    return ", ".join(filter(None, parts))
