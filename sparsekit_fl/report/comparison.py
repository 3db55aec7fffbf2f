"""Comparison: the rows of a section's table, for terminals, CSV, JSON and LaTeX alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sparsekit.errors import InvalidValueError
from sparsekit_fl.report.table import (
    COLUMNS,
    Column,
    Spread,
    base_columns,
    metric_columns,
    seconds_to,
    share_text,
    spread,
    value_of,
)
from sparsekit_fl.report.trials import Level, Section, Trial
from sparsekit_fl.results.extra import need

__all__ = ["TARGET", "WALL_TIME", "Comparison", "Row", "check_target"]

TARGET = "target_seconds"
_SUBJECT = "fedlps"
_MOST_FIRST = 6
WALL_TIME = "wall time includes what else ran on the machine, simulated time does not"
_SIGNS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def check_target(target: float | None) -> float | None:
    """Raise unless a target is an accuracy in (0, 1], or None."""
    if target is not None and not 0 < target <= 1:
        raise InvalidValueError(f"the target must be an accuracy in (0, 1], got {target}; for 90 % pass 0.9")
    return target


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One method at one level.

    Args:
        method: Name of the method.
        level: Level of heterogeneity.
        label: Both, as far as they distinguish rows.
        numbers: Column name → mean and deviation over seeds.
        notes: Numbers of the footnotes, from 1.
    """

    method: str
    level: Level
    label: str
    numbers: Mapping[str, Spread]
    notes: tuple[int, ...]

    @property
    def signs(self) -> str:
        """Numbers of the footnotes as superscripts."""
        return " ".join(str(number).translate(_SIGNS) for number in self.notes)


@dataclass(frozen=True, eq=False)
class Comparison:
    """The table of a section.

    Args:
        section: The trials.
        target: Accuracy whose time is a column; None takes nine tenths of the best method's, in whole per cent.
    """

    section: Section
    target: float | None = None

    @cached_property
    def goal(self) -> float:
        """The target accuracy."""
        if self.target is not None:
            return self.target
        accuracies = (
            spread([value_of(trial.result or {}, COLUMNS[0]) for trial in trials]).mean for trials in self._places.values()
        )
        best = max((accuracy for accuracy in accuracies if accuracy is not None), default=0.0)
        return math.floor(90 * best) / 100 if best >= 0.02 else best

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns of the table, with the time to the target before the last."""
        wanted = Column(TARGET, f"time to {share_text(self.goal).replace('.0%', '%')}", (), "seconds")
        return (*self._base[:-1], wanted, self._base[-1], *self.metrics)

    @cached_property
    def _base(self) -> tuple[Column, ...]:
        return base_columns([trial.result for trial in self.section.finished if trial.result])

    @cached_property
    def metrics(self) -> tuple[Column, ...]:
        """Columns of what the others lack: further metrics, means by examples, the worst tenth."""
        return metric_columns([trial.result for trial in self.section.finished if trial.result])

    @cached_property
    def _places(self) -> dict[tuple[str, Level], list[Trial]]:
        section = self.section
        found = {(method, level): section.of(method, level) for level in section.levels for method in section.methods}
        return {place: trials for place, trials in found.items() if trials}

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Footnotes, each once, in the order of their numbers."""
        return tuple(dict.fromkeys(note for trials in self._places.values() for trial in trials for note in trial.notes))

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One row for each method and level with a finished run."""
        rows = []
        for (method, level), trials in self._places.items():
            numbers = [self.numbers(trial) for trial in trials]
            rows.append(
                Row(
                    method=method,
                    level=level,
                    label=", ".join(filter(None, (method, self.section.level_text(level)))),
                    numbers={name: spread([own[name] for own in numbers]) for name in numbers[0]},
                    notes=tuple(sorted({self.notes.index(note) + 1 for trial in trials for note in trial.notes})),
                )
            )
        return tuple(rows)

    @property
    def subject(self) -> str:
        """The method that the comparison is about: FedLPS where it takes part, else the first."""
        methods = self.section.methods
        return _SUBJECT if _SUBJECT in methods else methods[0]

    @cached_property
    def highlighted(self) -> tuple[str, ...]:
        """Methods that stand out among many: the subject, the front of accuracy against FLOPs, then the most accurate."""
        points = [
            (row.numbers["flops_compact"].mean or 0.0, -row.numbers["personal_accuracy"].mean, row.method)
            for row in self.rows
            if row.numbers["personal_accuracy"].mean is not None
        ]
        front: list[str] = []
        least = 0.0
        for _, loss, method in sorted(points):
            if not front or loss < least:
                front.append(method)
                least = loss
        ranked = [method for _, method in sorted((loss, method) for _, loss, method in points)]
        wanted = list(dict.fromkeys([self.subject, *front, *ranked]))
        return tuple(wanted[: max(_MOST_FIRST, len(set(front)))])

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Method → its place, which decides colour, dashes and marker; highlighted ones first, so that theirs differ most."""
        methods = self.section.methods
        first = [method for method in methods if method in self.highlighted]
        return {method: place for place, method in enumerate(dict.fromkeys([*first, *methods]))}

    def seeds_text(self) -> str:
        """Say over how many seeds the means are taken."""
        count = len(self.section.seeds)
        return f"mean ± sample deviation over {count} seeds" if count > 1 else "one seed"

    def numbers(self, trial: Trial) -> dict[str, float | None]:
        """Return the numbers of a finished trial by column name."""
        result = trial.result or {"rounds": []}
        own = {column.name: value_of(result, column) for column in (*self._base, *self.metrics)}
        return {**own, TARGET: seconds_to(result, self.goal)}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: the content of `compare.json`."""
        return {
            "title": self.section.title,
            "methods": list(self.section.methods),
            "seeds": list(self.section.seeds),
            "target": self.goal,
            "trials": self._records(),
            "failed": [{**_identity(trial), "error": trial.error} for trial in self.section.failed],
            "summary": {row.label: {name: asdict(found) for name, found in row.numbers.items()} for row in self.rows},
            "notes": {row.label: [self.notes[number - 1] for number in row.notes] for row in self.rows if row.notes},
        }

    def _records(self) -> list[dict[str, Any]]:
        return [{**_identity(trial), **self.numbers(trial)} for trial in self.section.finished]

    def to_csv(self) -> str:
        """Return CSV with one line per finished trial.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        frame = need("pandas").DataFrame(
            self._records(), columns=None if self.section.finished else ["method", "seed"], dtype=object
        )
        return str(frame.to_csv(index=False, lineterminator="\n"))

    def show(self, console: Console) -> None:
        """Print the table, cut into several where the console is too narrow, then footnotes and failures."""
        labels = [escape(f"{row.label} {row.signs}".strip()) for row in self.rows]
        texts = {column.name: [column.spread_text(row.numbers[column.name]) for row in self.rows] for column in self.columns}
        for part in self._parts(console.width, labels, texts):
            table = Table("method", box=box.SIMPLE_HEAD, pad_edge=False)
            table.columns[0].no_wrap = True
            for column in part:
                table.add_column(column.title, justify="right", no_wrap=True)
            for place, label in enumerate(labels):
                table.add_row(label, *(texts[column.name][place] for column in part))
            console.print(table)
        console.print(f"{self.seeds_text()}; {WALL_TIME}")
        for number, note in enumerate(self.notes, 1):
            console.print(f"{str(number).translate(_SIGNS)} {escape(note)}", soft_wrap=True)
        for trial in self.section.failed:
            console.print(f"failed: {escape(self.section.name_of(trial))}: {escape(trial.error or '')}", soft_wrap=True)

    def _parts(self, width: int, labels: list[str], texts: Mapping[str, list[str]]) -> list[list[Column]]:
        """Split the columns, in their order, into tables of at most `width` letters."""
        first = max([len("method"), *map(len, labels)]) + 3
        parts: list[list[Column]] = []
        left = 0
        for column in self.columns:
            needed = max([len(column.title), *map(len, texts[column.name])]) + 3
            if needed > left:
                parts.append([])
                left = width - first
            parts[-1].append(column)
            left -= needed
        return parts


def _identity(trial: Trial) -> dict[str, Any]:
    return {"method": trial.method, "seed": trial.seed, **asdict(trial.level)}
