"""Comparison: trials under one protocol as rows of a table, for terminals, CSV, JSON, Markdown and LaTeX alike."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sparsekit.errors import InvalidValueError
from sparsekit_fl.config import HETEROGENEITY
from sparsekit_fl.errors import need
from sparsekit_fl.results.report.columns import Column, columns_of, texts, value_of
from sparsekit_fl.results.report.trials import Level, Trial, protocols_of
from sparsekit_fl.results.text import share_text

TARGET = "target_seconds"
_SUBJECT = "fedlps"
_MOST_FIRST = 6
_GROUP = ["method", "level"]
_RUN = [*_GROUP, "seed"]
_COSTS = ("flops", "flops_paper", "simulated_seconds")


def check_target(target: float | None) -> float | None:
    """Raise unless a target is an accuracy in (0, 1], or None."""
    if target is not None and not 0 < target <= 1:
        raise InvalidValueError(f"the target must be an accuracy in (0, 1], got {target}; for 90 % pass 0.9")
    return target


def _order(level: Level) -> tuple[int, int]:
    """Order levels from less to more different clients."""
    return ["", *HETEROGENEITY].index(level[0]), level[1]


@dataclass(frozen=True, eq=False)
class Row:
    """One method at one level.

    Args:
        method: Name of the method.
        level: As of `Trial`.
        where: The level in words, as far as it distinguishes rows.
        n: Number of runs with finite scores.
        of: Number of runs, failed ones among them.
        mean: Column → mean over runs; NaN where no run has the number.
        deviation: Column → sample deviation; NaN with fewer than two runs.
        count: Column → number of runs that have the number.
        text: Column → the numbers as text.
        notes: Numbers of the footnotes, from 1.
    """

    method: str
    level: Level
    where: str
    n: int
    of: int
    mean: Mapping[str, float]
    deviation: Mapping[str, float]
    count: Mapping[str, int]
    text: Mapping[str, str]
    notes: tuple[int, ...]

    @property
    def label(self) -> str:
        """Method and level."""
        return ", ".join(filter(None, (self.method, self.where)))

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

    @property
    def slug(self) -> str:
        """The title as part of a file name."""
        return slug(self.title)

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
        return tuple(sorted({trial.level for trial, _ in self.results}, key=_order))

    def level_text(self, level: Level) -> str:
        """Say how a level differs from the others; empty where there is one."""
        known = [trial.level for trial in self.trials if trial.config]
        parts = [
            f"heterogeneity {level[0] or 'other'}" if len({devices for devices, _ in known}) > 1 else "",
            f"lacks {level[1]}" if len({lack for _, lack in known}) > 1 else "",
        ]
        return ", ".join(filter(None, parts))

    @cached_property
    def _base(self) -> tuple[Column, ...]:
        return columns_of([result for _, result in self.results])

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """Columns of the table, with the time to the target before the wall time."""
        wanted = Column(TARGET, f"time to {share_text(self.goal).replace('.0%', '%')}", (), "seconds")
        place = next(place for place, column in enumerate(self._base) if column.name == "wall_seconds")
        return (*self._base[:place], wanted, *self._base[place:])

    @cached_property
    def rounds(self) -> Any:
        """DataFrame with a row per run and scored round: costs so far, and scores as in `rounds_frame`.

        Here and in `runs` a level is its place in `levels`.
        """
        found = []
        for trial, result in self.results:
            for record in result["rounds"]:
                if record["evaluation"]:
                    costs = {name: record["cost"].get(name) for name in _COSTS}
                    found.append({**self._run(trial), "round": record["round"], **costs, **_scores(record["evaluation"])})
        return need("pandas").DataFrame(found, columns=None if found else [*_RUN, "round"])

    def _run(self, trial: Trial) -> dict[str, Any]:
        return {"method": trial.method, "level": self.levels.index(trial.level), "seed": trial.seed}

    @cached_property
    def _scored(self) -> Any:
        """DataFrame with a row per finished run and a column per number of the table, but for the time to the target."""
        found = [
            self._run(trial) | {column.name: value_of(result, column) for column in self._base}
            for trial, result in self.results
        ]
        columns = [*_RUN, *(column.name for column in self._base)]
        return need("pandas").DataFrame(found, columns=columns).set_index(_RUN).astype(float)

    @cached_property
    def goal(self) -> float:
        """The target accuracy."""
        if self.target is not None:
            return self.target
        means = self._scored["personal_accuracy"].groupby(level=_GROUP).mean().dropna()
        best = float(means.max()) if len(means) else 0.0
        # 90 * 0.7 is a little less than 63.
        return math.floor(round(90 * best, 9)) / 100 if best >= 0.02 else best

    @cached_property
    def runs(self) -> Any:
        """DataFrame with a row per finished run and a column per number, among them the simulated time to the target.

        Only rounds that were scored can reach it, so the time is no finer than the run's `eval_every`.
        """
        return self._scored.assign(**{TARGET: [_reached(result, self.goal) for _, result in self.results]})

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Footnotes, each once, in the order of their numbers."""
        return tuple(dict.fromkeys(note for trial in self.trials for note in trial.notes))

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One row for each method and level with a finished run."""
        if not self.results:
            return ()
        groups = self.runs.groupby(level=_GROUP)
        every = [(method, level) for level in range(len(self.levels)) for method in self.methods]
        places = [place for place in every if place in groups.groups]
        mean, deviation, count, size = (
            found.loc[places] for found in (groups.mean(), groups.std(), groups.count(), groups.size())
        )
        text = {}
        for column in self.columns:
            written = texts(column.unit, mean[column.name].tolist(), deviation[column.name].tolist())
            # The number of runs stands behind a mean over fewer runs than the row has.
            there = zip(written, count[column.name], size, strict=True)
            text[column.name] = [f"{one} ({n} of {of})" if 0 < n < of else one for one, n, of in there]
        scored = count[[name for name in count if name.startswith("personal_")]].max(axis=1)
        rows = []
        for place, (method, number) in enumerate(places):
            level = self.levels[number]
            own = [trial for trial in self.trials if trial.method == method]
            # What failed before it had a configuration counts at every level.
            here = [trial for trial in own if trial.level == level or not trial.config]
            rows.append(
                Row(
                    method, level, self.level_text(level),
                    n=int(scored.iloc[place]),
                    of=sum(bool(trial.result or trial.error) for trial in here),
                    mean=mean.iloc[place].to_dict(),
                    deviation=deviation.iloc[place].to_dict(),
                    count=count.iloc[place].to_dict(),
                    text={name: column[place] for name, column in text.items()},
                    notes=tuple(sorted({self.notes.index(note) + 1 for trial in here for note in trial.notes})),
                )
            )  # fmt: skip
        return tuple(rows)

    @property
    def subject(self) -> str:
        """The method that the comparison is about: FedLPS where it takes part, else the first."""
        return _SUBJECT if _SUBJECT in self.methods else self.methods[0]

    def highlighted(self, among: Iterable[str] | None = None) -> tuple[str, ...]:
        """Return methods that stand out among many, or among these: the subject, FedAvg and the most accurate."""
        allowed = set(self.methods if among is None else among)
        known: dict[str, float] = {}
        for row in self.rows:
            if row.method in allowed and not math.isnan(row.mean["personal_accuracy"]):
                known.setdefault(row.method, row.mean["personal_accuracy"])
        first = [method for method in (self.subject, "fedavg") if method in known]
        ranked = sorted(known, key=lambda method: -known[method])
        return tuple(dict.fromkeys([*first, *ranked]))[:_MOST_FIRST]

    def seeds_text(self) -> str:
        """Say over how many runs the means are taken."""
        most = max((row.of for row in self.rows), default=0)
        return "mean ± sample deviation over n seeds" if most > 1 else "one seed"

    def failures(self) -> list[str]:
        """Name the runs that failed, and finished ones whose scores are not finite."""
        found = [f"failed: {self._name(trial)}: {trial.error}" for trial in self.failed]
        for trial, result in self.results:
            scores = [value_of(result, column) for column in self._base if column.path[:2] == ("final", "personal")]
            if not any(score is not None and math.isfinite(score) for score in scores):
                found.append(f"diverged: {self._name(trial)} has no finite score")
        return found

    def _name(self, trial: Trial) -> str:
        level = self.level_text(trial.level) if trial.config else ""
        return ", ".join(filter(None, (trial.method, level, f"seed {trial.seed}")))

    def records(self) -> list[dict[str, Any]]:
        """Return a plain dict for each finished trial: who it is, and its numbers."""
        numbers = self.runs[[column.name for column in self.columns]].to_dict("records")
        return [
            {**_identity(trial), **{name: _plain(value) for name, value in own.items()}}
            for (trial, _), own in zip(self.results, numbers, strict=True)
        ]

    def _errors(self) -> list[dict[str, Any]]:
        return [{**_identity(trial), "error": trial.error} for trial in self.failed]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: the content of `compare.json`."""
        return {
            "title": self.title,
            "methods": list(self.methods),
            "seeds": sorted({trial.seed for trial, _ in self.results}),
            "target": self.goal,
            "trials": self.records(),
            "failed": self._errors(),
            "summary": {row.label: self._summary(row) for row in self.rows},
            "notes": {row.label: [self.notes[number - 1] for number in row.notes] for row in self.rows if row.notes},
        }

    def _summary(self, row: Row) -> dict[str, Any]:
        return {
            column.name: {
                "mean": _plain(row.mean[column.name]),
                "deviation": _plain(row.deviation[column.name]),
                "count": row.count[column.name],
                "of": row.of,
            }
            for column in self.columns
        }

    def to_csv(self) -> str:
        """Return CSV with one line per trial; one that failed has its error in place of numbers."""
        lines = [*self.records(), *self._errors()]
        return str(need("pandas").DataFrame(lines, dtype=object).to_csv(index=False, lineterminator="\n"))


def comparisons_of(trials: Iterable[Trial], *, order: Sequence[str] = (), target: float | None = None) -> list[Comparison]:
    """Make a comparison for each protocol of finished and failed trials; methods that `order` lacks follow as they appear."""
    found = []
    for title, members in protocols_of(trials):
        present = dict.fromkeys(trial.method for trial in members)
        methods = list(dict.fromkeys([*(name for name in order if name in present), *present]))
        ranks = [(_order(one.level), one.seed, methods.index(one.method), place) for place, one in enumerate(members)]
        found.append(Comparison(title, tuple(members[rank[-1]] for rank in sorted(ranks)), tuple(methods), target))
    return found


def slug(text: str) -> str:
    """Return a text as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _identity(trial: Trial) -> dict[str, Any]:
    heterogeneity, lack = trial.level
    return {
        "method": trial.method, "seed": trial.seed, "heterogeneity": heterogeneity or None,
        "lack_classes": None if lack < 0 else lack,
    }  # fmt: skip


def _scores(evaluation: Mapping[str, Any]) -> dict[str, float | None]:
    return {
        f"{part}_{metric}{kind}": value
        for kind, parts in (("", evaluation), ("_worst_decile", evaluation.get("worst_decile") or {}))
        for part in ("personal", "global")
        for metric, value in (parts.get(part) or {}).items()
    }


def _reached(result: Mapping[str, Any], goal: float) -> float:
    """Return the simulated time until a mean personal accuracy; NaN where no scored round has it."""
    for record in result["rounds"]:
        accuracy = ((record["evaluation"] or {}).get("personal") or {}).get("accuracy")
        if accuracy is not None and accuracy >= goal:
            return float(record["cost"]["simulated_seconds"])
    return math.nan


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
