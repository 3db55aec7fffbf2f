"""Trials: what folders of finished runs hold, and which of them may stand in one table. Needs no torch.

A trial is one method under one seed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsekit.errors import DataError
from sparsekit_fl.config import HETEROGENEITY
from sparsekit_fl.stored import flat, read_result

TRIAL_FILE = "trial.json"
"""Next to a run's own files: what was to be run, and the error of a run that failed."""

# What may differ between the trials of a table, since it changes no number but by chance.
_FREE = ("seed", "eval_every", "device")
_DECIDED = "capability"


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
    def notes(self) -> tuple[str, ...]:
        """Remarks on its numbers, one a line of its note."""
        return () if self.result is None else tuple(str(self.result.get("note", "")).splitlines())

    @staticmethod
    def of(saved: Mapping[str, Any]) -> Trial:
        """Read a trial from the content of `result.json`, or of a `trial.json`, which has no "final"."""
        return Trial(
            method=str(saved["method"]),
            seed=int(saved["seed"]),
            config=saved.get("config", {}),
            policies=saved.get("policies", {}),
            result=saved if "final" in saved else None,
            error=saved.get("error"),
        )


def collect(*folders: Path | str) -> list[Trial]:
    """Read all trials in folders and their subfolders. A run that is there twice counts once.

    Args:
        folders: Folders of runs or of comparisons.

    Raises:
        DataError: no such folder, a damaged file, no result at all, or different results of one method, seed and setting.
    """
    kept: dict[str, tuple[Trial, Path]] = {}
    for folder in map(Path, folders):
        for path, trial in _found(folder):
            key = json.dumps((trial.method, trial.seed, _protocol(trial.config)), sort_keys=True)
            other, where = kept.setdefault(key, (trial, path))
            if other.result is None:
                kept[key] = (trial, path)
            elif trial.result is not None and trial.result["final"] != other.result["final"]:
                raise DataError(
                    f"{trial.method}, seed {trial.seed}, has one result in {where} and another in {path}; leave one out"
                )
    return [trial for trial, _ in kept.values()]


def _found(root: Path) -> Iterator[tuple[Path, Trial]]:
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; pass the --out folder of `compare`, or of a finished run")
    homes = sorted({path.parent for name in ("result.json", TRIAL_FILE) for path in root.rglob(name)})
    if not homes:
        raise DataError(f"{root} holds no result; pass the --out folder of `compare`, or of a finished run")
    yield from ((home, _trial(home)) for home in homes)


def _trial(home: Path) -> Trial:
    if (home / "result.json").exists():
        return Trial.of(read_result(home))
    path = home / TRIAL_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return Trial.of({name: raw[name] for name in ("method", "seed", "config", "policies")} | {"error": raw.get("error")})
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is damaged: {error}; remove it") from error


def _protocol(config: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """Return what trials of one table have in common; an option that was not used is as one that is not there."""
    return {name: value for name, value in config.items() if value is not None and name not in {*_FREE, *without}}


def protocols_of(trials: Iterable[Trial]) -> list[tuple[str, list[Trial]]]:
    """Group trials, finished and failed ones, by everything that must be equal in one table.

    Returns:
        Title and trials of each group; titles that would be equal name the settings that differ.
    """
    groups: list[tuple[dict[str, Any], list[Trial]]] = []
    # What decides an option itself, and what failed before it had a configuration, joins a group of the others.
    for trial in sorted(trials, key=lambda trial: 2 if not trial.config else _DECIDED in trial.policies):
        own, decided = _protocol(trial.config), {_DECIDED} & set(trial.policies)
        fitting = (one for shared, one in groups if not own or _protocol(shared, decided) == _protocol(own, decided))
        members = next(fitting, None)
        if members is None:
            groups.append((own, [trial]))
        else:
            members.append(trial)
    return list(zip(_titles([shared for shared, _ in groups]), (members for _, members in groups), strict=True))


def _titles(protocols: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return model, data and size of each protocol; equal titles also name the settings that differ, such as `lr 0.1`."""
    plain, settings = [_title(one) for one in protocols], [flat(one) for one in protocols]
    titles = []
    for title, own in zip(plain, settings, strict=True):
        others = [other for name, other in zip(plain, settings, strict=True) if name == title]
        names = sorted({name for other in others for name in other if len({str(each.get(name)) for each in others}) > 1})
        words = [_setting(name, own[name]) for name in names if own.get(name) is not None]
        titles.append(", ".join([title, *words]))
    return titles


def _setting(name: str, value: Any) -> str:
    """Name a setting, such as `lr 0.1` or `heterogeneity low`."""
    level = next((level for level, drawn in HETEROGENEITY.items() if drawn == value or list(drawn) == value), None)
    return f"heterogeneity {level}" if level else f"{name.rpartition('.')[2].replace('_', ' ')} {value}"


def _title(config: Mapping[str, Any]) -> str:
    about = config.get("experiment", {})
    counts = [(about.get("clients"), "client"), (config.get("rounds"), "round")]
    parts = [
        f"{about['model']} on {about['dataset']}" if {"model", "dataset"} <= set(about) else "runs",
        *(f"{number} {what}{'' if number == 1 else 's'}" for number, what in counts if number is not None),
    ]
    return ", ".join(parts)
