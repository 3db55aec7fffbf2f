"""Comparison: runs under one protocol, with means and deviations over seeds, as frames, text and JSON. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from sparsekit.errors import InvalidValueError
from sparsekit_fl.config import HETEROGENEITY
from sparsekit_fl.errors import need
from sparsekit_fl.stored import number_text, texts
from sparsekit_fl.trials import Level, Trial, protocols_of

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
class Row:
    """One method at one level.

    Args:
        method: Name of the method.
        level: As of `Trial`.
        label: Method and level in words, as far as they distinguish rows.
        n: Number of runs with finite scores.
        finished: Number of finished runs.
        of: Number of runs, failed ones among them.
        mean: Column → mean over runs; NaN where no run has the number.
        deviation: Column → sample deviation; NaN with fewer than two runs.
        count: Column → number of runs that have the number.
        notes: Numbers of the footnotes, from 1.
    """

    method: str
    level: Level
    label: str
    n: int
    finished: int
    of: int
    mean: Mapping[str, float]
    deviation: Mapping[str, float]
    count: Mapping[str, int]
    notes: tuple[int, ...]

    @property
    def runs(self) -> str:
        """Number of runs behind the means: `3`, or `2 of 3` where one failed or has no finite score."""
        return str(self.n) if self.n == self.of else f"{self.n} of {self.of}"


@dataclass(frozen=True, eq=False)
class Comparison:
    """Trials under one protocol.

    Args:
        title: Model, data set and settings, in words.
        trials: Trials of all methods, seeds and levels; at least one.
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
    def levels(self) -> tuple[Level, ...]:
        """Levels of finished trials, from less to more different clients."""
        return tuple(sorted({trial.level for trial, _ in self.results}, key=_rank))

    def level_text(self, level: Level) -> str:
        """Say how a level differs from the others; empty where there is one."""
        known = [trial.level for trial in self.trials if trial.config]
        parts = [
            f"heterogeneity {level[0] or 'other'}" if len({devices for devices, _ in known}) > 1 else "",
            f"lacks {level[1]}" if len({lack for _, lack in known}) > 1 else "",
        ]
        return ", ".join(filter(None, parts))

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
        rows = [(trial.method, trial.level, value_of(result, _SCORES[0])) for trial, result in self.results]
        means = (
            need("pandas").DataFrame(rows, columns=["method", "level", "y"]).groupby(["method", "level"])["y"].mean().dropna()
        )
        best = float(means.max()) if len(means) else 0.0
        # 90 * 0.7 is a little less than 63.
        return math.floor(round(90 * best, 9)) / 100 if best >= 0.02 else best

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with a row per finished run and a column per number.

        The index has method, heterogeneity, number of lacking classes, and seed. `target_seconds` is the simulated time until a
        scored round reached the target; it is not finer than the run's `eval_every`. A number that a run lacks is NaN.
        """
        keys, names = ["method", "heterogeneity", "lack_classes", "seed"], [column.name for column in self.columns]
        rows = [
            (trial.method, *trial.level, trial.seed,
             *(_reached(result, self.goal) if one.name == TARGET else value_of(result, one) for one in self.columns))
            for trial, result in self.results
        ]  # fmt: skip
        return need("pandas").DataFrame(rows, columns=[*keys, *names]).set_index(keys).astype(float)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Footnotes, each once, in the order of their numbers."""
        return tuple(dict.fromkeys(note for trial in self.trials for note in trial.notes))

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One row for each method and level with a finished run."""
        groups, rows = dict(list(self.to_frame().groupby(level=[0, 1, 2]))), []
        for level in self.levels:
            for method in self.methods:
                own = groups.get((method, *level))
                if own is None:
                    continue
                # What failed before it had a configuration counts at every level.
                here = [one for one in self.trials if one.method == method and (one.level == level or not one.config)]
                count = own.count()
                rows.append(
                    Row(
                        method, level, ", ".join(filter(None, (method, self.level_text(level)))),
                        n=int(max(count[name] for name in own if name.startswith("personal_"))),
                        finished=len(own),
                        of=sum(bool(trial.result or trial.error) for trial in here),
                        mean=own.mean().to_dict(), deviation=own.std().to_dict(), count=count.to_dict(),
                        notes=tuple(sorted({self.notes.index(note) + 1 for trial in here for note in trial.notes})),
                    )
                )  # fmt: skip
        return tuple(rows)

    def table(self, *parts: str) -> Any:
        """Return the table as a DataFrame of text: a row per method and level, n, and a column per number that some row has.

        Args:
            parts: Keep only the numbers under these keys of a result, "final" and "cost"; none keeps all.
        """
        labels = [f"{row.label} {' '.join(map(str, row.notes)).translate(_SIGNS)}".strip() for row in self.rows]
        found: dict[str, list[str]] = {"n": [row.runs for row in self.rows]}
        for column in self.columns:
            name, means = column.name, [row.mean[column.name] for row in self.rows]
            if not all(map(math.isnan, means)) and (not parts or column.path[0] in parts):
                written = texts(column.unit, means, [row.deviation[name] for row in self.rows])
                # The number of runs stands behind a mean over fewer runs than the row has.
                both = zip(written, self.rows, strict=True)
                found[column.title] = [
                    f"{one} ({row.count[name]} of {row.finished})" if 0 < row.count[name] < row.finished else one
                    for one, row in both
                ]
        return need("pandas").DataFrame(found, index=need("pandas").Index(labels, name="method"))

    def highlighted(self, among: Iterable[str] | None = None) -> list[str]:
        """Return at most six methods that stand out among these: FedLPS or the first one, FedAvg, and the most accurate."""
        allowed = set(self.methods if among is None else among)
        first = [_SUBJECT if _SUBJECT in self.methods else self.methods[0], "fedavg"]
        ranked = sorted(self.rows, key=lambda row: -row.mean["personal_accuracy"])
        found = dict.fromkeys([*first, *(row.method for row in ranked), *self.methods])
        return [method for method in found if method in allowed][:_MOST_FIRST]

    def seeds_text(self) -> str:
        """Say over how many runs the means are taken."""
        most = max((row.of for row in self.rows), default=0)
        return "mean ± sample deviation over n seeds" if most > 1 else "one seed"

    def remarks(self) -> list[str]:
        """Return what stands below the table: footnotes, runs that failed, and finished ones whose scores are not finite."""
        found = [f"{str(number).translate(_SIGNS)} {note}" for number, note in enumerate(self.notes, 1)]
        found += [f"failed: {self._name(trial)}: {trial.error}" for trial in self.failed]
        for trial, result in self.results:
            scores = [value_of(result, column) for column in self.columns if column.name.startswith("personal_")]
            if not any(score is not None and math.isfinite(score) for score in scores):
                found.append(f"diverged: {self._name(trial)} has no finite score")
        return found

    def _name(self, trial: Trial) -> str:
        level = self.level_text(trial.level) if trial.config else ""
        return ", ".join(filter(None, (trial.method, level, f"seed {trial.seed}")))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: what `sparsekit compare --json` prints."""
        numbers = self.to_frame().to_dict("records")
        return {
            "title": self.title,
            "methods": list(self.methods),
            "seeds": sorted({trial.seed for trial, _ in self.results}),
            "target": self.goal,
            "trials": [
                {**_identity(trial), **{name: _plain(value) for name, value in own.items()}}
                for (trial, _), own in zip(self.results, numbers, strict=True)
            ],
            "failed": [{**_identity(trial), "error": trial.error} for trial in self.failed],
            "summary": {
                row.label: {
                    name: {
                        "mean": _plain(row.mean[name]),
                        "deviation": _plain(row.deviation[name]),
                        "count": row.count[name],
                        "of": row.of,
                    }
                    for name in row.mean
                }
                for row in self.rows
            },
            "notes": {row.label: [self.notes[number - 1] for number in row.notes] for row in self.rows if row.notes},
        }


def comparisons_of(trials: Iterable[Trial], *, order: Sequence[str] = (), target: float | None = None) -> list[Comparison]:
    """Make a comparison for each protocol of finished and failed trials; methods that `order` lacks follow as they appear."""
    found = []
    for title, members in protocols_of(trials):
        present = dict.fromkeys(trial.method for trial in members)
        methods = list(dict.fromkeys([*(name for name in order if name in present), *present]))
        ranked = sorted(members, key=lambda one: (_rank(one.level), one.seed, methods.index(one.method)))
        found.append(Comparison(title, tuple(ranked), tuple(methods), target))
    return found


def _rank(level: Level) -> tuple[int, int]:
    """Order levels from less to more different clients."""
    return ["", *HETEROGENEITY].index(level[0]), level[1]


def _identity(trial: Trial) -> dict[str, Any]:
    heterogeneity, lack = trial.level
    names = {"method": trial.method, "seed": trial.seed, "heterogeneity": heterogeneity or None}
    return names | {"lack_classes": None if lack < 0 else lack}


def _reached(result: Mapping[str, Any], goal: float) -> float:
    """Return the simulated time until a mean personal accuracy; NaN where no scored round has it."""
    for record in result["rounds"]:
        accuracy = ((record["evaluation"] or {}).get("personal") or {}).get("accuracy")
        if accuracy is not None and accuracy >= goal:
            return float(record["cost"]["simulated_seconds"])
    return math.nan


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
