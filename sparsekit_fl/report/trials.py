"""Cells and sections: what a folder of finished runs holds, grouped into comparisons that may stand in one table.

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
from sparsekit_fl.options.config import HETEROGENEITY
from sparsekit_fl.report.table import read_result

__all__ = ["TRIAL_FILE", "Level", "Section", "Trial", "collect", "level_of", "sections_of"]

TRIAL_FILE = "cell.json"
"""Beside a run's own files: what was to be run, and the error of a run that failed."""

# What may differ between the trials of a section: the axes of the comparison, and what changes no number.
_AXES = ("seed", "capability_levels", "eval_every", "device")
_DECIDED = "capability"


@dataclass(frozen=True)
class Level:
    """How different clients are, in device and data.

    Args:
        heterogeneity: A name in `config.HETEROGENEITY`; None where the capabilities are others.
        lack_classes: How many classes every client lacks; None where the data were not dealt that way.
    """

    heterogeneity: str | None = None
    lack_classes: int | None = None

    @property
    def order(self) -> tuple[int, int]:
        """From less to more different clients."""
        names = list(HETEROGENEITY)
        place = names.index(self.heterogeneity) if self.heterogeneity in names else -1
        return place, -1 if self.lack_classes is None else self.lack_classes


def level_of(config: Mapping[str, Any]) -> Level:
    """The level of a run, from the `config` of its result."""
    levels = config.get("capability_levels")
    named = None if levels is None else tuple(levels)
    heterogeneity = next((name for name, drawn in HETEROGENEITY.items() if drawn == named), None)
    options = config.get("experiment", {}).get("partition_options", {})
    return Level(heterogeneity, options.get("lack_classes"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """One run of a comparison.

    Args:
        method: Its name.
        seed: Of the run.
        config: As in `result.json`; empty where the run could not even be set up.
        policies: As in `result.json`.
        result: As in `result.json`; None where there is none.
        error: Why there is none; None where the run is finished or only interrupted.
    """

    method: str
    seed: int
    config: Mapping[str, Any]
    policies: Mapping[str, str] = field(default_factory=dict)
    result: Mapping[str, Any] | None = None
    error: str | None = None

    @property
    def level(self) -> Level:
        """Of heterogeneity."""
        return level_of(self.config)

    @property
    def note(self) -> str:
        """What the method says of its numbers."""
        return str((self.result or {}).get("note", ""))

    @staticmethod
    def of(result: Mapping[str, Any]) -> Trial:
        """A finished trial, from `result.json`."""
        config = result.get("config", {})
        return Trial(
            method=str(result["method"]),
            seed=int(result["seed"]),
            config=config,
            policies=result.get("policies", {}),
            result=result,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Section:
    """Cells under one protocol.

    Args:
        title: What was run, for people.
        slug: The same, for file names.
        dataset: Name of the data set, where it is known.
        trials: Of all methods, seeds and levels.
        methods: Their names, in the order of tables.
    """

    title: str
    slug: str
    dataset: str
    trials: tuple[Trial, ...]
    methods: tuple[str, ...]

    @property
    def finished(self) -> tuple[Trial, ...]:
        """Cells that have a result."""
        return tuple(trial for trial in self.trials if trial.result is not None)

    @property
    def failed(self) -> tuple[Trial, ...]:
        """Cells that ended with an error."""
        return tuple(trial for trial in self.trials if trial.error is not None)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels that occur, from less to more different clients."""
        return tuple(sorted({trial.level for trial in self.finished}, key=lambda level: level.order))

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that occur."""
        return tuple(sorted({trial.seed for trial in self.finished}))

    def level_text(self, level: Level) -> str:
        """What distinguishes a level from the others of this section; empty where there is one."""
        parts = []
        levels = {trial.level for trial in self.trials if trial.config}
        if len({other.heterogeneity for other in levels}) > 1:
            parts.append(f"heterogeneity {level.heterogeneity or 'other'}")
        if len({other.lack_classes for other in levels}) > 1:
            parts.append(f"lacks {level.lack_classes}")
        return ", ".join(parts)

    def name_of(self, trial: Trial) -> str:
        """Method, level and seed of a trial, for people."""
        level = self.level_text(trial.level) if trial.config else ""
        return ", ".join(part for part in (trial.method, level, f"seed {trial.seed}") if part)

    def of(self, method: str, level: Level) -> list[Trial]:
        """Finished trials of a method at a level, by seed."""
        found = [trial for trial in self.finished if trial.method == method and trial.level == level]
        return sorted(found, key=lambda trial: trial.seed)


def collect(folder: Path | str) -> list[Trial]:
    """All trials in a folder: its own result, those of its subfolders, and results under other names.

    Args:
        folder: Of a run, of a comparison, or of copies of `result.json` under names of their own.

    Raises:
        DataError: no such folder, a file that should be a result and is none, or nothing at all.
    """
    root = Path(folder)
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; pass the --out folder of `compare`, or of a finished run")
    trials = [_copy(path) for path in sorted(root.glob("*.json")) if path.name not in ("result.json", TRIAL_FILE)]
    homes = {path.parent for name in ("result.json", TRIAL_FILE) for path in root.rglob(name)}
    trials += [_trial(home) for home in sorted(homes)]
    found = [trial for trial in trials if trial is not None]
    if not found:
        raise DataError(f"{root} holds no result; pass the --out folder of `compare`, or of a finished run")
    return found


def _copy(path: Path) -> Trial | None:
    """A result under another name; None for any other JSON file."""
    try:
        return Trial.of(read_result(path))
    except DataError:
        return None


def _trial(home: Path) -> Trial | None:
    if (home / "result.json").exists():
        return Trial.of(read_result(home))
    try:
        raw = json.loads((home / TRIAL_FILE).read_text(encoding="utf-8"))
        config = raw["config"]
        return Trial(
            method=raw["method"],
            seed=int(raw["seed"]),
            config=config,
            policies=raw["policies"],
            error=raw.get("error"),
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{home / TRIAL_FILE} is damaged: {error}; remove it") from error


def sections_of(trials: Iterable[Trial], *, order: Sequence[str] = ()) -> list[Section]:
    """Group trials by everything that must be equal in one table.

    Args:
        trials: Finished and failed ones.
        order: Methods in the order of tables; others follow as they first appear.
    """
    groups = _groups(trials)
    sections = []
    for title, members in zip(_titles([members[0].config for members in groups]), groups, strict=True):
        known = [name for name in order if any(trial.method == name for trial in members)]
        methods = list(dict.fromkeys([*known, *(trial.method for trial in members)]))
        members.sort(key=lambda trial, methods=methods: (trial.level.order, trial.seed, methods.index(trial.method)))  # type: ignore[misc]
        sections.append(
            Section(
                title=title,
                slug=re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-"),
                dataset=str(members[0].config.get("experiment", {}).get("dataset", "")),
                trials=tuple(members),
                methods=tuple(methods),
            )
        )
    return sections


def _groups(trials: Iterable[Trial]) -> list[list[Trial]]:
    groups: dict[str, list[Trial]] = {}
    willed, orphans = [], []
    for trial in trials:
        if not trial.config:
            orphans.append(trial)
        elif _DECIDED in trial.policies:
            willed.append(trial)
        else:
            groups.setdefault(json.dumps(_protocol(trial.config), sort_keys=True), []).append(trial)
    for trial in willed:
        # A method that decides an option itself belongs to what was run beside it under the option's other value.
        own = {**_protocol(trial.config), _DECIDED: None}
        beside = (key for key in groups if {**json.loads(key), _DECIDED: None} == json.loads(json.dumps(own)))
        groups.setdefault(next(beside, json.dumps(own, sort_keys=True)), []).append(trial)
    if orphans:
        # So does what failed before it had a configuration.
        groups.setdefault(next(iter(groups), ""), []).extend(orphans)
    return list(groups.values())


def _protocol(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without the axes of a comparison, and without options that were not used: older results lack them."""
    kept = {name: value for name, value in config.items() if name not in _AXES and value is not None}
    level = level_of(config)
    if level.heterogeneity is None:
        kept["capability_levels"] = config.get("capability_levels")
    if level.lack_classes is not None:
        kept["experiment"] = {**config["experiment"], "partition_options": "lack_classes"}
    return kept


def _titles(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """One per section; equal ones are told apart by the settings that differ."""
    plain = [_title(config) for config in configs]
    settings = [_flat(_protocol(config)) if config else {} for config in configs]
    titles = []
    for title, own in zip(plain, settings, strict=True):
        others = [other for name, other in zip(plain, settings, strict=True) if name == title]
        names = sorted({name for other in others for name in other if len({str(each.get(name)) for each in others}) > 1})
        titles.append(", ".join([title, *(f"{name.rpartition('.')[2].replace('_', ' ')} {own.get(name)}" for name in names)]))
    return titles


def _flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found.update(_flat(value, f"{path}{name}.") if isinstance(value, Mapping) else {path + name: value})
    return found


def _title(config: Mapping[str, Any]) -> str:
    about = config.get("experiment", {})
    parts = [f"{about['model']} on {about['dataset']}"] if {"model", "dataset"} <= set(about) else ["runs"]
    if "clients" in about:
        parts.append(f"{about['clients']} clients")
    if "rounds" in config:
        parts.append(f"{config['rounds']} rounds")
    return ", ".join(parts)
