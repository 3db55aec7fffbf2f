"""Comparison: finished runs under one protocol, with means and deviations over seeds, in frames and JSON. Needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparsekit.errors import DataError, InvalidValueError
from sparsekit_fl.config import HETEROGENEITY
from sparsekit_fl.errors import need
from sparsekit_fl.stored import flat, number_text, read_result, texts

TARGET = "target_seconds"
# What may differ between the runs of a table, since it changes no number but by chance.
_FREE = ("seed", "eval_every", "device")
_DECIDED = "capability"


class Column(NamedTuple):
    """One number of a result: its name in JSON, its title in tables, the keys that lead to it, and its unit as of `stored`."""

    name: str
    title: str
    path: tuple[str, ...]
    unit: str


_SCORES = (
    Column("personal_accuracy", "personal accuracy", ("final", "personal", "accuracy"), "share"),
    Column("validation_accuracy", "validation accuracy", ("final", "validation", "accuracy"), "share"),
    Column("global_accuracy", "global accuracy", ("final", "global", "accuracy"), "share"),
)
_COSTS = (
    Column("flops", "FLOPs", ("cost", "flops"), "flops"),
    Column("simulated_seconds", "simulated time", ("cost", "simulated_seconds"), "seconds"),
    Column("uplink_bytes", "sent up", ("cost", "uplink_bytes"), "bytes"),
    Column("downlink_bytes", "sent down", ("cost", "downlink_bytes"), "bytes"),
    Column("flops_paper", "FLOPs, paper", ("cost", "flops_paper"), "flops"),
    Column("wall_seconds", "wall time", ("cost", "wall_seconds"), "seconds"),
)
# Shown where a method runs forward passes by which it decides while it trains.
_TRAINING = (
    Column("flops_training", "FLOPs, training alone", ("cost", "flops_training"), "flops"),
    Column("simulated_seconds_training", "time, training alone", ("cost", "simulated_seconds_training"), "seconds"),
)


def columns_of(results: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    """Return the columns of a table: accuracies, costs, other metrics, and the worst tenth of clients."""
    found = [*_SCORES, *_COSTS, *(_TRAINING if any(one["cost"].get("flops_scoring") for one in results) else ())]
    for name in dict.fromkeys(name for one in results for name in one["final"].get("personal", {})):
        unit, worst = "share" if name == "accuracy" else "number", ("final", "worst_decile", "personal", name)
        if name != "accuracy":
            found.append(Column(f"personal_{name}", name, ("final", "personal", name), unit))
        found.append(Column(f"personal_{name}_worst_decile", f"{name}, worst tenth", worst, unit))
    return tuple(found)


def value_of(result: Mapping[str, Any], column: Column) -> float | None:
    """Return a number of a result; None where it has none."""
    found: Any = result
    for step in column.path:
        found = found.get(step) if isinstance(found, Mapping) else None
    return None if found is None else float(found)


def check_target(target: float | None) -> None:
    """Raise unless a target is an accuracy in (0, 1], or None."""
    if target is not None and not 0 < target <= 1:
        raise InvalidValueError(f"the target must be an accuracy in (0, 1], got {target}; for 90 % pass 0.9")


class Failure(NamedTuple):
    """A run that ended with an error."""

    method: str
    seed: int
    error: str


@dataclass(frozen=True, eq=False)
class Comparison:
    """Runs under one protocol.

    Args:
        title: Model, data set and settings, in words.
        results: As in `result.json`: finished runs of all methods and seeds.
        methods: Names of the methods, in the order of tables.
        target: Accuracy whose time is a column; None takes nine tenths of the best method's, in whole per cent.
        failed: Runs that ended with an error.
    """

    title: str
    results: Sequence[Mapping[str, Any]]
    methods: tuple[str, ...]
    target: float | None = None
    failed: tuple[Failure, ...] = ()

    @property
    def config(self) -> Mapping[str, Any]:
        """Configuration of the first run; empty if none is finished."""
        return self.results[0]["config"] if self.results else {}

    @property
    def dataset(self) -> str:
        """Name of the data set; empty where it is not known."""
        return str(self.config.get("experiment", {}).get("dataset", ""))

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """Columns of the table, with the time to the target before the wall time."""
        found = list(columns_of(self.results))
        title = f"time to {number_text('share', self.goal).replace('.0%', '%')}"
        found.insert(len(_SCORES) + len(_COSTS) - 1, Column(TARGET, title, ("cost",), "seconds"))
        return tuple(found)

    @cached_property
    def goal(self) -> float:
        """The target accuracy."""
        if self.target is not None:
            return self.target
        rows = [(result["method"], value_of(result, _SCORES[0])) for result in self.results]
        means = need("pandas").DataFrame(rows, columns=["method", "y"]).groupby("method")["y"].mean().dropna()
        best = float(means.max()) if len(means) else 0.0
        # 90 * 0.7 is a little less than 63.
        return math.floor(round(90 * best, 9)) / 100 if best >= 0.02 else best

    @cached_property
    def frame(self) -> Any:
        """DataFrame with a row per finished run and a column per number; its index has method and seed.

        `target_seconds` is the simulated time until a scored round reached the target; it is not finer than the run's
        `eval_every`. A number that a run lacks is NaN.
        """
        keys, names = ["method", "seed"], [column.name for column in self.columns]
        rows = [
            (result["method"], result["seed"],
             *(_reached(result, self.goal) if one.name == TARGET else value_of(result, one) for one in self.columns))
            for result in self.results
        ]  # fmt: skip
        return need("pandas").DataFrame(rows, columns=[*keys, *names]).set_index(keys).astype(float)

    @cached_property
    def summary(self) -> Any:
        """DataFrame of means over the seeds: a row per method with a finished run, and three columns per number.

        They are `(number, "mean")`, NaN where no run has the number; `(number, "std")`, the sample deviation, NaN with fewer
        than two runs; and `(number, "count")`, how many runs have the number.
        """
        found = self.frame.groupby("method").agg(["mean", "std", "count"])
        return found.loc[[method for method in self.methods if method in found.index]]

    @cached_property
    def runs(self) -> Any:
        """DataFrame of numbers of runs, a row per row of `summary`: with finite scores, finished, and ended at all."""
        known = np.isfinite(self.frame.filter(like="personal_")).any(axis=1).groupby("method").sum()
        finished = self.frame.groupby("method").size()
        failed = need("pandas").Series([one.method for one in self.failed], dtype=object).value_counts()
        ended = finished.add(failed, fill_value=0).astype(int)
        return (
            need("pandas").DataFrame({"known": known, "finished": finished, "ended": ended}).loc[self.summary.index].astype(int)
        )

    def table(self, *parts: str) -> Any:
        """Return the table as a DataFrame of text: a row per method, n, and a column per number that some row has.

        `n` is the number of runs behind the means: `3`, or `2 of 3` where one failed or has no finite score.

        Args:
            parts: Keep only the numbers under these keys of a result, "final" and "cost"; none keeps all.
        """
        runs = list(self.runs.itertuples())
        found = {"n": [str(one.known) if one.known == one.ended else f"{one.known} of {one.ended}" for one in runs]}
        for column in self.columns:
            own = self.summary[column.name]
            if own["mean"].notna().any() and (not parts or column.path[0] in parts):
                written = texts(column.unit, list(own["mean"]), list(own["std"]))
                # The number of runs stands behind a mean over fewer runs than the row has.
                found[column.title] = [
                    f"{text} ({count} of {one.finished})" if 0 < count < one.finished else text
                    for text, one, count in zip(written, runs, own["count"], strict=True)
                ]
        return need("pandas").DataFrame(found, index=self.summary.index)

    def seeds_text(self) -> str:
        """Say over how many runs the means are taken."""
        return "mean ± sample deviation over n seeds" if (self.runs["ended"] > 1).any() else "one seed"

    @property
    def notes(self) -> dict[str, list[str]]:
        """Method → remarks on its numbers, for methods that have any."""
        found: dict[str, list[str]] = {}
        for method, line in dict.fromkeys(
            (one["method"], line) for one in self.results for line in one.get("note", "").splitlines()
        ):
            found.setdefault(method, []).append(line)
        return found

    def remarks(self) -> list[str]:
        """Return what stands below the table: notes, runs that failed, and finished ones whose scores are not finite."""
        found = [f"{method}: {line}" for method, lines in self.notes.items() for line in lines]
        found += [f"failed: {one.method}, seed {one.seed}: {one.error}" for one in self.failed]
        scores = self.frame.filter(like="personal_")
        lost = scores.index[~np.isfinite(scores).any(axis=1)]
        return found + [f"diverged: {method}, seed {seed} has no finite score" for method, seed in lost]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: what `sparsekit compare --json` prints."""
        return {
            "title": self.title,
            "methods": list(self.methods),
            "seeds": sorted({result["seed"] for result in self.results}),
            "target": self.goal,
            "trials": [_plain(row) for row in self.frame.reset_index().to_dict("records")],
            "failed": [one._asdict() for one in self.failed],
            "summary": {
                method: {
                    name: {
                        **_plain({"mean": row[name, "mean"], "deviation": row[name, "std"]}),
                        "count": int(row[name, "count"]),
                        "of": int(self.runs.loc[method, "ended"]),
                    }
                    for name in self.frame
                }
                for method, row in self.summary.iterrows()
            },
            "notes": self.notes,
        }


def comparisons_of(
    results: Iterable[Mapping[str, Any]],
    *,
    order: Sequence[str] = (),
    target: float | None = None,
    failed: Sequence[Failure] = (),
) -> list[Comparison]:
    """Make a comparison of the runs that have everything in common that must be equal in one table.

    Args:
        results: As in `result.json`.
        order: Methods in the order of tables; others follow as they appear.
        target: As of `Comparison`.
        failed: Runs that ended with an error. They belong to the first comparison, which they make if nothing is finished.

    Returns:
        The comparisons; titles that would be equal name the settings that differ.
    """
    groups: list[tuple[dict[str, Any], list[Mapping[str, Any]]]] = []
    # What decides an option itself joins a group of the others.
    for result in sorted(results, key=lambda one: _DECIDED in one.get("policies", {})):
        own, decided = _protocol(result), {_DECIDED} & set(result.get("policies", {}))
        fitting = (one for shared, one in groups if _without(shared, decided) == _without(own, decided))
        members = next(fitting, None)
        if members is None:
            groups.append((own, [result]))
        else:
            members.append(result)
    if failed and not groups:
        groups.append(({}, []))
    titles = _titles([own for own, _ in groups])
    found = []
    for number, (_, members) in enumerate(groups):
        lost = () if number else tuple(failed)
        present = dict.fromkeys([*(result["method"] for result in members), *(one.method for one in lost)])
        methods = tuple(dict.fromkeys([*(name for name in order if name in present), *present]))
        ranked = sorted(members, key=lambda one: (one["seed"], methods.index(one["method"])))
        found.append(Comparison(titles[number], ranked, methods, target, lost))
    return found


def read_results(*folders: Path | str) -> list[dict[str, Any]]:
    """Read all results in folders and their subfolders. A run that is there twice counts once.

    Args:
        folders: Folders of runs or of comparisons.

    Raises:
        DataError: a folder without a result, a damaged file, or different results of one method, seed and setting.
    """
    kept: dict[str, tuple[dict[str, Any], Path]] = {}
    for folder in map(Path, folders):
        paths = sorted(folder.rglob("result.json"))
        if not paths:
            raise DataError(f"{folder} holds no result; pass the --out folder of `compare`, or of a finished run")
        for path in paths:
            result = read_result(path)
            key = json.dumps((result["method"], result["seed"], _protocol(result)), sort_keys=True)
            other, where = kept.setdefault(key, (result, path))
            if result["final"] != other["final"]:
                raise DataError(
                    f"{result['method']}, seed {result['seed']}, has one result in {where} and another in {path}; leave one out"
                )
    return [result for result, _ in kept.values()]


def _protocol(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what runs of one table have in common; an option that was not used is as one that is not there."""
    return _without({name: value for name, value in result["config"].items() if value is not None}, _FREE)


def _without(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


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
    level = next((level for level, drawn in HETEROGENEITY.items() if list(drawn) == value), None)
    return f"heterogeneity {level}" if level else f"{name.rpartition('.')[2].replace('_', ' ')} {value}"


def _title(config: Mapping[str, Any]) -> str:
    about = config.get("experiment", {})
    counts = [(about.get("clients"), "client"), (config.get("rounds"), "round")]
    parts = [
        f"{about['model']} on {about['dataset']}" if {"model", "dataset"} <= set(about) else "runs",
        *(f"{number} {what}{'' if number == 1 else 's'}" for number, what in counts if number is not None),
    ]
    return ", ".join(parts)


def _reached(result: Mapping[str, Any], goal: float) -> float:
    """Return the simulated time until a mean personal accuracy; NaN where no scored round has it."""
    for record in result["rounds"]:
        accuracy = ((record["evaluation"] or {}).get("personal") or {}).get("accuracy")
        if accuracy is not None and accuracy >= goal:
            return float(record["cost"]["simulated_seconds"])
    return math.nan


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of numbers with None for NaN, as JSON has it."""
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}
