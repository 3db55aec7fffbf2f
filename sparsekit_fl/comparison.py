"""Compares finished runs with equal settings: means and deviations over seeds, as data frames and JSON. Needs no torch."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_json

from sparsekit.errors import DataError, require
from sparsekit.page import svg_file
from sparsekit_fl.config import HETEROGENEITY
from sparsekit_fl.curves import AXES, curves_of
from sparsekit_fl.stored import Column, columns_of, flat, read_result, texts, unlike

# Options that may differ between the runs of a table, since they affect numbers only by chance.
_FREE = ("seed", "eval_every", "device")
_DECIDED = "redraw_capability"


@dataclass(frozen=True, eq=False)
class Comparison:
    """Tables and curves of finished runs with equal settings, for a notebook or a paper. `Comparison.read` makes them.

    Args:
        title: Model, data and size of the runs.
        results: All runs, of every method and seed, as in `result.json`.
        methods: Names of the methods, in the order of tables.
    """

    title: str
    results: Sequence[Mapping[str, Any]]
    methods: tuple[str, ...]

    @staticmethod
    def read(*folders: Path | str) -> "list[Comparison]":
        """Read all finished runs in folders and their subfolders, such as the `--out` folder of `sparsekit compare`.

        Returns:
            One comparison for each group of runs with equal settings.

        Raises:
            DataError: a folder holds no result, or two results of the same run differ.
        """
        return comparisons_of(read_results(*folders))

    def to_csv(self, path: Path | str) -> None:
        """Write a file with a row for each run, and its scores and costs as plain numbers. Empty: the run lacks the number."""
        self.frame.to_csv(path)

    def to_latex(self, *parts: str) -> str:
        """Return the text of `table` as a LaTeX table for the package booktabs; `parts` are as there."""
        table = self.table(*parts)
        text: str = table.to_latex(escape=True, column_format="l" + "r" * len(table.columns))
        return text.replace("±", r"$\pm$").replace("–", "--")

    def save_curves(self, folder: Path | str) -> list[Path]:
        """Draw the mean personal score over rounds, FLOPs and simulated time, as one SVG file each.

        Args:
            folder: Gets the files `round.svg`, `flops.svg` and `simulated_seconds.svg`. It is made if necessary.

        Returns:
            The files; empty if no method was scored twice.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        paths = []
        for (name, *_), text in zip(AXES, curves_of(self.results, self.methods, svg_file), strict=True):
            if text:
                paths.append(Path(folder) / f"{name}.svg")
                paths[-1].write_text(text, encoding="utf-8")
        return paths

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        return columns_of(self.results)

    @cached_property
    def frame(self) -> Any:
        """DataFrame with a row per (method, seed) and a column per path; a number that a run lacks is NaN."""
        names = ["method", "seed", *(column.path for column in self.columns)]
        frame = require("pandas").DataFrame([flat(result) for result in self.results], columns=names)
        return frame.set_index(["method", "seed"]).astype(float)

    @cached_property
    def summary(self) -> Any:
        """DataFrame with a row per method, and for each path the columns (path, "mean") and (path, "std").

        They are the mean and the sample standard deviation over seeds; NaN with fewer than one or two runs with that number.
        """
        return self.frame.groupby("method").agg(["mean", "std"]).loc[list(self.methods)]

    @cached_property
    def runs(self) -> dict[str, int]:
        """Method → number of its runs that have a finite score."""
        known = [method for method, _ in self.frame.index[self._known]]
        return {method: known.count(method) for method in self.methods}

    @property
    def _known(self) -> Any:
        return np.isfinite(self.frame.filter(like="final.personal.")).any(axis=1)

    def table(self, *parts: str) -> Any:
        """Return a DataFrame of text: a row per method, its number of seeds (see `runs`), and a column per known number.

        If `parts` are given, "final" or "cost", only the numbers under these keys of a result are included.
        """
        found = {"seeds": list(map(str, self.runs.values()))}
        if not parts or "final" in parts:
            found |= {"own": ["yes" if own else "no" for own in self.own.values()]} if len({*self.own.values()}) > 1 else {}
        for path, title, unit in self.columns:
            own = self.summary[path]
            if own["mean"].notna().any() and (not parts or path.startswith(parts)):
                found[title] = texts(unit, list(own["mean"]), list(own["std"]))
        return require("pandas").DataFrame(found, index=self.summary.index)

    def seeds_text(self) -> str:
        return "one seed" if max(self.runs.values()) == 1 else "mean ± sample deviation over the seeds"

    @property
    def notes(self) -> dict[str, list[str]]:
        found = {one["method"]: one.get("note", "").splitlines() for one in self.results}
        return {method: lines for method, lines in found.items() if lines}

    @cached_property
    def own(self) -> dict[str, bool]:
        """Method → whether some client deploys entries or units that it keeps for itself, such as a head."""
        found = dict.fromkeys(self.methods, False)
        for one in self.results:
            found[one["method"]] |= any(client.get("own") for client in one["final"].get("per_client", ()))
        return found

    def remarks(self) -> list[str]:
        notes = [f"{method}: {line}" for method, lines in self.notes.items() for line in lines]
        if len({*self.own.values()}) > 1:
            own, shared = (", ".join(name for name, one in self.own.items() if one is kept) for kept in (True, False))
            notes.insert(
                0,
                f"own: each client of {own} deploys parts that it keeps for itself, such as a head. Those of {shared} deploy"
                " entries of the server alone, so their personal accuracies are of unlike models.",
            )
        return notes

    def troubles(self) -> list[str]:
        """Return footnotes on runs that deviate from the others, for example because they stopped early or diverged."""
        lost = self.frame.index[~self._known]
        found = [f"diverged: {method}, seed {seed} has no finite score" for method, seed in lost]
        return found + [f"{one['method']}, seed {one['seed']}: {text}" for one in self.results for text in unlike(one)]

    def gains(self) -> list[str]:
        """Return one line per method: its gain in accuracy over the method `local`, paired by seed; empty without `local`.

        Accuracy is that of the models that clients deploy, on their own test data. The error is a standard error over n seeds.
        """
        if "local" not in self.methods or "final.personal.accuracy" not in self.frame:
            return []
        scores, flops = self.frame["final.personal.accuracy"].unstack("method"), self.summary["cost.flops", "mean"]
        found = []
        for method in (name for name in self.methods if name != "local"):
            gain = 100 * (scores[method] - scores["local"]).dropna()
            if len(gain):
                error = f" ± {gain.std() / len(gain) ** 0.5:.1f}" if len(gain) > 1 else ""
                share = flops[method] / flops["local"]
                found.append(
                    f"{method} less local: {gain.mean():+.1f}{error} points, n = {len(gain)}, {share:.0%} of its FLOPs"
                )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: what `sparsekit compare --json` prints."""
        return {
            "title": self.title,
            "methods": list(self.methods),
            "runs": self.runs,
            "trials": _plain(self.frame.reset_index().to_dict("records")),
            "summary": _plain(
                {method: {path: row[path].to_dict() for path in self.frame} for method, row in self.summary.iterrows()}
            ),
            "notes": self.notes,
            "gains": self.gains(),
        }


def _plain(value: Any) -> Any:
    """Return a value as plain JSON values, with null for numbers that are not finite."""
    return json.loads(to_json(value, inf_nan_mode="null"))


def comparisons_of(results: Iterable[Mapping[str, Any]], *, order: Sequence[str] = ()) -> list[Comparison]:
    """Group results (contents of `result.json`) into comparisons of runs with equal settings.

    Methods in `order` come first, then the others as they appear. Titles that would be equal name the settings that differ.
    """
    groups: list[tuple[dict[str, Any], list[Mapping[str, Any]]]] = []
    # Methods that set the option `_DECIDED` themselves come last, and join a group with either value of it.
    for result in sorted(results, key=lambda one: _DECIDED in one.get("method_options", {})):
        own, decided = _protocol(result), {_DECIDED} & set(result.get("method_options", {}))
        fitting = (one for shared, one in groups if _without(shared, decided) == _without(own, decided))
        members = next(fitting, None)
        if members is None:
            groups.append((own, [result]))
        else:
            members.append(result)
    found = []
    for title, (_, members) in zip(_titles([own for own, _ in groups]), groups, strict=True):
        present = dict.fromkeys(result["method"] for result in members)
        methods = tuple(dict.fromkeys([*(name for name in order if name in present), *present]))
        ranked = sorted(members, key=lambda one: (one["seed"], methods.index(one["method"])))
        found.append(Comparison(title, ranked, methods))
    return found


def read_results(*folders: Path | str) -> list[dict[str, Any]]:
    """Read all results in folders and their subfolders. Identical copies of a run count once."""
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
                raise DataError(f"{path} and {where} are different results of one method, seed and setting; leave one out")
    return [result for result, _ in kept.values()]


def _protocol(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that all runs of one table share, without options that are None."""
    return _without({name: value for name, value in result["config"].items() if value is not None}, _FREE)


def _without(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def _titles(protocols: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return model, data set and size of each protocol; equal titles also name the settings that differ, such as `lr 0.1`."""
    plain, settings = [_title(one) for one in protocols], [flat(one) for one in protocols]
    titles = []
    for title, own in zip(plain, settings, strict=True):
        others = [other for name, other in zip(plain, settings, strict=True) if name == title]
        names = sorted({name for other in others for name in other if len({str(each.get(name)) for each in others}) > 1})
        words = [_setting(name, own[name]) for name in names if own.get(name) is not None]
        titles.append(", ".join([title, *words]))
    return titles


def _setting(name: str, value: Any) -> str:
    """Return a setting as text, such as `lr 0.1` or `heterogeneity low`."""
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
