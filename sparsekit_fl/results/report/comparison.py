"""Comparison: trials under one protocol as rows of a table, for terminals, CSV, JSON, Markdown and LaTeX alike."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sparsekit.errors import InvalidValueError
from sparsekit_fl.options.config import HETEROGENEITY
from sparsekit_fl.results.extra import need
from sparsekit_fl.results.report.columns import Column, columns_of, texts, value_of
from sparsekit_fl.results.report.frame import LEVEL, long_frame, runs_frame
from sparsekit_fl.results.report.trials import Trial, protocols_of
from sparsekit_fl.results.text import share_text

TARGET = "target_seconds"
_SUBJECT = "fedlps"
_MOST_FIRST = 6


def check_target(target: float | None) -> float | None:
    """Raise unless a target is an accuracy in (0, 1], or None."""
    if target is not None and not 0 < target <= 1:
        raise InvalidValueError(f"the target must be an accuracy in (0, 1], got {target}; for 90 % pass 0.9")
    return target


def order_of(heterogeneity: str, lack_classes: int) -> tuple[int, int]:
    """Order levels from less to more different clients."""
    return ["", *HETEROGENEITY].index(heterogeneity), lack_classes


@dataclass(frozen=True, eq=False)
class Row:
    """One method at one level.

    Args:
        method: Name of the method.
        heterogeneity: As of `Trial`.
        lack_classes: As of `Trial`.
        level: The level in words, as far as it distinguishes rows.
        n: Number of runs with finite scores.
        of: Number of runs, failed ones among them.
        mean: Column → mean over runs; NaN where no run has the number.
        deviation: Column → sample deviation; NaN with fewer than two runs.
        count: Column → number of runs that have the number.
        text: Column → the numbers as text.
        notes: Numbers of the footnotes, from 1.
    """

    method: str
    heterogeneity: str
    lack_classes: int
    level: str
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
        return ", ".join(filter(None, (self.method, self.level)))

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
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Configuration of the first trial that has one."""
        return next((trial.config for trial in self.trials if trial.config), {})

    @property
    def dataset(self) -> str:
        """Name of the data set; empty where it is not known."""
        return str(self.config.get("experiment", {}).get("dataset", ""))

    @property
    def finished(self) -> list[Trial]:
        """Trials with a result."""
        return [trial for trial in self.trials if trial.result is not None]

    @property
    def failed(self) -> list[Trial]:
        """Trials that ended with an error."""
        return [trial for trial in self.trials if trial.error is not None]

    @cached_property
    def levels(self) -> tuple[tuple[str, int], ...]:
        """Heterogeneity and number of lacking classes of finished trials, from less to more different clients."""
        found = {(trial.heterogeneity, trial.lack_classes) for trial in self.finished}
        return tuple(sorted(found, key=lambda level: order_of(*level)))

    def level_text(self, heterogeneity: str, lack_classes: int) -> str:
        """Say how a level differs from the others; empty where there is one."""
        known = [trial for trial in self.trials if trial.config]
        parts = [
            f"heterogeneity {heterogeneity or 'other'}" if len({trial.heterogeneity for trial in known}) > 1 else "",
            f"lacks {lack_classes}" if len({trial.lack_classes for trial in known}) > 1 else "",
        ]
        return ", ".join(filter(None, parts))

    @cached_property
    def _base(self) -> tuple[Column, ...]:
        return columns_of([trial.result for trial in self.finished if trial.result])

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns of the table, with the time to the target before the wall time."""
        wanted = Column(TARGET, f"time to {share_text(self.goal).replace('.0%', '%')}", (), "seconds")
        place = next(place for place, column in enumerate(self._base) if column.name == "wall_seconds")
        return (*self._base[:place], wanted, *self._base[place:])

    @cached_property
    def frame(self) -> Any:
        """The long table of `long_frame`."""
        return long_frame(self.finished, self._base)

    @cached_property
    def runs(self) -> Any:
        """A row per finished run and a column per number; see `runs_frame`."""
        return runs_frame(self.frame, self.goal)

    @cached_property
    def goal(self) -> float:
        """The target accuracy."""
        if self.target is not None:
            return self.target
        known: dict[tuple[str, str, int], list[float]] = {}
        for trial in self.finished:
            accuracy = value_of(trial.result or {}, self._base[0])
            if accuracy is not None:
                known.setdefault((trial.method, trial.heterogeneity, trial.lack_classes), []).append(accuracy)
        best = max((math.fsum(own) / len(own) for own in known.values()), default=0.0)
        return math.floor(90 * best) / 100 if best >= 0.02 else best

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Footnotes, each once, in the order of their numbers."""
        return tuple(dict.fromkeys(note for trial in self.finished for note in trial.notes))

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One row for each method and level with a finished run."""
        if not self.finished:
            return ()
        groups = self.runs.groupby(level=["method", *LEVEL])
        mean, deviation, count = groups.mean(), groups.std(), groups.count()
        places = [(method, *level) for level in self.levels for method in self.methods if (method, *level) in mean.index]
        written = {column.name: self._texts(column, places, mean, deviation, count) for column in self.columns}
        rows = []
        for place, (method, heterogeneity, lack) in enumerate(places):
            own = [trial for trial in self.trials if trial.method == method]
            here = [trial for trial in own if (trial.heterogeneity, trial.lack_classes) == (heterogeneity, lack)]
            key = (method, heterogeneity, lack)
            scored = [name for name in ("personal_accuracy", *count.columns) if name.startswith("personal_")]
            rows.append(
                Row(
                    method, heterogeneity, lack, self.level_text(heterogeneity, lack),
                    n=int(count.loc[key, scored].max()),
                    of=sum(bool(trial.result or trial.error) for trial in here)
                    + sum(bool(trial.error and not trial.config) for trial in own),
                    mean=mean.loc[key].to_dict(),
                    deviation=deviation.loc[key].to_dict(),
                    count=count.loc[key].astype(int).to_dict(),
                    text={name: column[place] for name, column in written.items()},
                    notes=tuple(sorted({self.notes.index(note) + 1 for trial in here for note in trial.notes})),
                )
            )  # fmt: skip
        return tuple(rows)

    def _texts(
        self, column: Column, places: Sequence[tuple[str, str, int]], mean: Any, deviation: Any, count: Any
    ) -> list[str]:
        """Write a column; the number of runs stands behind a mean over fewer runs than the row has."""
        found = [tuple(frame.loc[place, column.name] for frame in (mean, deviation, count)) for place in places]
        runs = self.runs.groupby(level=["method", *LEVEL]).size()
        short = [
            f" ({n} of {runs[place]})" if 0 < n < runs[place] else "" for place, (_, _, n) in zip(places, found, strict=True)
        ]
        written = texts(column.unit, [float(one[0]) for one in found], [float(one[1]) for one in found])
        return [text + more for text, more in zip(written, short, strict=True)]

    @property
    def subject(self) -> str:
        """The method that the comparison is about: FedLPS where it takes part, else the first."""
        return _SUBJECT if _SUBJECT in self.methods else self.methods[0]

    def highlighted(self, among: Iterable[str] | None = None) -> tuple[str, ...]:
        """Return methods that stand out among many: the subject, FedAvg, the front of accuracy and FLOPs, the most accurate.

        Args:
            among: The methods to choose from; None takes all.
        """
        allowed = set(self.methods if among is None else among)
        known: dict[str, tuple[float, float]] = {}
        for row in self.rows:
            point = row.mean["flops_compact"], -row.mean["personal_accuracy"]
            if row.method in allowed and not math.isnan(sum(point)):
                known.setdefault(row.method, point)
        front: list[str] = []
        for method in sorted(known, key=known.__getitem__):
            if not front or known[method][1] < known[front[-1]][1]:
                front.append(method)
        first = [method for method in (self.subject, "fedavg") if method in known]
        ranked = sorted(known, key=lambda method: known[method][1])
        wanted = list(dict.fromkeys([*first, *front, *ranked]))
        return tuple(wanted[: max(_MOST_FIRST, len({*first, *front}))])

    def seeds_text(self) -> str:
        """Say over how many runs the means are taken."""
        most = max((row.of for row in self.rows), default=0)
        return "mean ± sample deviation over n seeds" if most > 1 else "one seed"

    def failures(self) -> list[str]:
        """Name the runs that failed, and finished ones whose scores are not finite."""
        found = [f"failed: {self.name_of(trial)}: {trial.error}" for trial in self.failed]
        for trial in self.finished:
            scores = [value_of(trial.result or {}, column) for column in self._base if column.path[:2] == ("final", "personal")]
            if not any(score is not None and math.isfinite(score) for score in scores):
                found.append(f"diverged: {self.name_of(trial)} has no finite score")
        return found

    def name_of(self, trial: Trial) -> str:
        """Join method, level and seed of a trial."""
        level = self.level_text(trial.heterogeneity, trial.lack_classes) if trial.config else ""
        return ", ".join(filter(None, (trial.method, level, f"seed {trial.seed}")))

    def records(self) -> list[dict[str, Any]]:
        """Return a plain dict for each finished trial: who it is, and its numbers."""
        found = []
        for trial in self.finished:
            own = self.runs.loc[(trial.method, trial.heterogeneity, trial.lack_classes, trial.seed)]
            found.append({**_identity(trial), **{column.name: _plain(own[column.name]) for column in self.columns}})
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: the content of `compare.json`."""
        return {
            "title": self.title,
            "methods": list(self.methods),
            "seeds": sorted({trial.seed for trial in self.finished}),
            "target": self.goal,
            "trials": self.records(),
            "failed": [{**_identity(trial), "error": trial.error} for trial in self.failed],
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
        lines = [*self.records(), *({**_identity(trial), "error": trial.error} for trial in self.failed)]
        return str(need("pandas").DataFrame(lines, dtype=object).to_csv(index=False, lineterminator="\n"))


def comparisons_of(trials: Iterable[Trial], *, order: Sequence[str] = (), target: float | None = None) -> list[Comparison]:
    """Make a comparison for each protocol.

    Args:
        trials: Finished and failed ones.
        order: Methods in the order of tables; others follow as they first appear.
        target: As of `Comparison`.
    """
    found = []
    for title, members in protocols_of(trials):
        present = dict.fromkeys(trial.method for trial in members)
        methods = list(dict.fromkeys([*(name for name in order if name in present), *present]))
        ranks = {
            id(one): (order_of(one.heterogeneity, one.lack_classes), one.seed, methods.index(one.method)) for one in members
        }
        ranked = sorted(members, key=lambda trial, ranks=ranks: ranks[id(trial)])  # type: ignore[misc]
        found.append(Comparison(title, tuple(ranked), tuple(methods), target))
    return found


def _identity(trial: Trial) -> dict[str, Any]:
    lack = trial.lack_classes
    return {
        "method": trial.method, "seed": trial.seed, "heterogeneity": trial.heterogeneity or None,
        "lack_classes": None if lack < 0 else lack,
    }  # fmt: skip


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
