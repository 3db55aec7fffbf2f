"""Comparison: runs under one protocol, with means and deviations over seeds, as frames, text and JSON. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from sparsekit.errors import InvalidValueError
from sparsekit_fl.errors import need
from sparsekit_fl.stored import number_text, texts
from sparsekit_fl.trials import Trial, protocols_of

TARGET = "target_seconds"
_SUBJECT = "fedlps"
_MOST_FIRST = 6
_SIGNS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


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


@dataclass(frozen=True, eq=False)
class Comparison:
    """Trials under one protocol.

    Args:
        title: Model, data set and settings, in words.
        trials: Trials of all methods and seeds; at least one.
        methods: Names of the methods, in the order of tables.
        target: Accuracy whose time is a column; None takes nine tenths of the best method's, in whole per cent.
    """

    title: str
    trials: tuple[Trial, ...]
    methods: tuple[str, ...]
    target: float | None = None

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Configuration of the first trial that has one."""
        return next((trial.config for trial in self.trials if trial.config), {})

    @property
    def dataset(self) -> str:
        """Name of the data set; empty where it is not known."""
        return str(self.config.get("experiment", {}).get("dataset", ""))

    @cached_property
    def results(self) -> list[tuple[Trial, Mapping[str, Any]]]:
        """Finished trials with their results."""
        return [(trial, trial.result) for trial in self.trials if trial.result is not None]

    @property
    def failed(self) -> list[Trial]:
        """Trials that ended with an error."""
        return [trial for trial in self.trials if trial.error is not None]

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """Columns of the table, with the time to the target before the wall time."""
        found = list(columns_of([result for _, result in self.results]))
        title = f"time to {number_text('share', self.goal).replace('.0%', '%')}"
        found.insert(len(_SCORES) + len(_COSTS) - 1, Column(TARGET, title, ("cost",), "seconds"))
        return tuple(found)

    @cached_property
    def goal(self) -> float:
        """The target accuracy."""
        if self.target is not None:
            return self.target
        rows = [(trial.method, value_of(result, _SCORES[0])) for trial, result in self.results]
        means = need("pandas").DataFrame(rows, columns=["method", "y"]).groupby("method")["y"].mean().dropna()
        best = float(means.max()) if len(means) else 0.0
        # 90 * 0.7 is a little less than 63.
        return math.floor(round(90 * best, 9)) / 100 if best >= 0.02 else best

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with a row per finished run and a column per number; its index has method and seed.

        `target_seconds` is the simulated time until a scored round reached the target; it is not finer than the run's
        `eval_every`. A number that a run lacks is NaN.
        """
        keys, names = ["method", "seed"], [column.name for column in self.columns]
        rows = [
            (trial.method, trial.seed,
             *(_reached(result, self.goal) if one.name == TARGET else value_of(result, one) for one in self.columns))
            for trial, result in self.results
        ]  # fmt: skip
        return need("pandas").DataFrame(rows, columns=[*keys, *names]).set_index(keys).astype(float)

    @cached_property
    def summary(self) -> Any:
        """DataFrame of means over the seeds: a row per method with a finished run, and three columns per number.

        They are `(number, "mean")`, NaN where no run has the number; `(number, "std")`, the sample deviation, NaN with fewer
        than two runs; and `(number, "count")`, how many runs have the number.
        """
        found = self.to_frame().groupby("method").agg(["mean", "std", "count"])
        return found.loc[[method for method in self.methods if method in found.index]]

    def runs_of(self, method: str) -> tuple[int, int]:
        """Return the number of runs of a method that have finite scores, and of those that ended, failed ones included."""
        counts = self.summary.loc[method].xs("count", level=1)
        ended = [trial for trial in self.trials if trial.method == method and (trial.result or trial.error)]
        return int(max(counts[name] for name in counts.index if name.startswith("personal_"))), len(ended)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Footnotes, each once, in the order of their numbers."""
        return tuple(dict.fromkeys(note for trial in self.trials for note in trial.notes))

    def notes_of(self, method: str) -> list[int]:
        """Return the numbers of a method's footnotes, from 1."""
        return sorted({self.notes.index(note) + 1 for trial in self.trials if trial.method == method for note in trial.notes})

    def table(self, *parts: str) -> Any:
        """Return the table as a DataFrame of text: a row per method, n, and a column per number that some row has.

        `n` is the number of runs behind the means: `3`, or `2 of 3` where one failed or has no finite score.

        Args:
            parts: Keep only the numbers under these keys of a result, "final" and "cost"; none keeps all.
        """
        methods, pandas = list(self.summary.index), need("pandas")
        labels = [f"{name} {' '.join(map(str, self.notes_of(name))).translate(_SIGNS)}".strip() for name in methods]
        runs = [self.runs_of(name) for name in methods]
        found = {"n": [str(known) if known == ended else f"{known} of {ended}" for known, ended in runs]}
        finished = self.to_frame().groupby("method").size()
        for column in self.columns:
            own = self.summary[column.name]
            if own["mean"].notna().any() and (not parts or column.path[0] in parts):
                written = texts(column.unit, list(own["mean"]), list(own["std"]))
                # The number of runs stands behind a mean over fewer runs than the row has.
                found[column.title] = [
                    f"{text} ({count} of {finished[name]})" if 0 < count < finished[name] else text
                    for text, name, count in zip(written, methods, own["count"], strict=True)
                ]
        return pandas.DataFrame(found, index=pandas.Index(labels, name="method"))

    def highlighted(self, among: Iterable[str] | None = None) -> list[str]:
        """Return at most six methods that stand out among these: FedLPS or the first one, FedAvg, and the most accurate."""
        allowed = set(self.methods if among is None else among)
        first = [_SUBJECT if _SUBJECT in self.methods else self.methods[0], "fedavg"]
        ranked = self.summary["personal_accuracy", "mean"].sort_values(ascending=False, kind="stable").index
        return [method for method in dict.fromkeys([*first, *ranked, *self.methods]) if method in allowed][:_MOST_FIRST]

    def seeds_text(self) -> str:
        """Say over how many runs the means are taken."""
        most = max((self.runs_of(method)[1] for method in self.summary.index), default=0)
        return "mean ± sample deviation over n seeds" if most > 1 else "one seed"

    def remarks(self) -> list[str]:
        """Return what stands below the table: footnotes, runs that failed, and finished ones whose scores are not finite."""
        found = [f"{str(number).translate(_SIGNS)} {note}" for number, note in enumerate(self.notes, 1)]
        found += [f"failed: {trial.method}, seed {trial.seed}: {trial.error}" for trial in self.failed]
        scores = self.to_frame().filter(like="personal_")
        lost = scores.index[~np.isfinite(scores).any(axis=1)]
        return found + [f"diverged: {method}, seed {seed} has no finite score" for method, seed in lost]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: what `sparsekit compare --json` prints."""
        numbers = self.to_frame().to_dict("records")
        ended = {method: self.runs_of(method)[1] for method in self.summary.index}
        return {
            "title": self.title,
            "methods": list(self.methods),
            "seeds": sorted({trial.seed for trial, _ in self.results}),
            "target": self.goal,
            "trials": [
                {"method": trial.method, "seed": trial.seed, **{name: _plain(value) for name, value in own.items()}}
                for (trial, _), own in zip(self.results, numbers, strict=True)
            ],
            "failed": [{"method": one.method, "seed": one.seed, "error": one.error} for one in self.failed],
            "summary": {
                method: {
                    name: {
                        "mean": _plain(row[name, "mean"]),
                        "deviation": _plain(row[name, "std"]),
                        "count": int(row[name, "count"]),
                        "of": ended[method],
                    }
                    for name in self.summary.columns.unique(0)
                }
                for method, row in self.summary.iterrows()
            },
            "notes": {
                name: [self.notes[number - 1] for number in self.notes_of(name)] for name in ended if self.notes_of(name)
            },
        }


def comparisons_of(trials: Iterable[Trial], *, order: Sequence[str] = (), target: float | None = None) -> list[Comparison]:
    """Make a comparison for each protocol of finished and failed trials; methods that `order` lacks follow as they appear."""
    found = []
    for title, members in protocols_of(trials):
        present = dict.fromkeys(trial.method for trial in members)
        methods = list(dict.fromkeys([*(name for name in order if name in present), *present]))
        ranked = sorted(members, key=lambda one: (one.seed, methods.index(one.method)))
        found.append(Comparison(title, tuple(ranked), tuple(methods), target))
    return found


def _reached(result: Mapping[str, Any], goal: float) -> float:
    """Return the simulated time until a mean personal accuracy; NaN where no scored round has it."""
    for record in result["rounds"]:
        accuracy = ((record["evaluation"] or {}).get("personal") or {}).get("accuracy")
        if accuracy is not None and accuracy >= goal:
            return float(record["cost"]["simulated_seconds"])
    return math.nan


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
