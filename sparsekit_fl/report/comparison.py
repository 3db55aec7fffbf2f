"""Comparison: the rows of a section's table, for terminals, CSV, JSON and LaTeX alike."""

from __future__ import annotations

import csv
import io
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
from sparsekit_fl.report.table import COLUMNS, Column, Spread, seconds_to, share_text, spread, value_of
from sparsekit_fl.report.trials import Level, Section, Trial

__all__ = ["Comparison", "Row", "check_target"]

TARGET = "target_seconds"
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
        method: Its name.
        level: Of heterogeneity.
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
        """The footnotes' numbers as superscripts."""
        return " ".join(str(number).translate(_SIGNS) for number in self.notes)


@dataclass(frozen=True, eq=False)
class Comparison:
    """The table of a section.

    Args:
        section: Its trials.
        target: Accuracy whose time is a column; None takes nine tenths of the best method's, in whole per cent.
    """

    section: Section
    target: float | None = None

    @cached_property
    def goal(self) -> float:
        """The target accuracy."""
        if self.target is not None:
            return self.target
        best = max((accuracy for row in self._plain if (accuracy := row["personal_accuracy"].mean) is not None), default=0.0)
        return math.floor(90 * best) / 100 if best >= 0.02 else best

    @property
    def columns(self) -> tuple[Column, ...]:
        """Of the table, the time to the target among them."""
        last = len(COLUMNS) - 1
        wanted = Column(TARGET, f"time to {share_text(self.goal).replace('.0%', '%')}", (), "seconds")
        return (*COLUMNS[:last], wanted, COLUMNS[last])

    @property
    def _places(self) -> list[tuple[str, Level]]:
        section = self.section
        found = [(method, level) for level in section.levels for method in section.methods]
        return [place for place in found if section.of(*place)]

    @cached_property
    def _plain(self) -> list[dict[str, Spread]]:
        return [
            {
                column.name: spread([value_of(trial.result or {}, column) for trial in self.section.of(*place)])
                for column in COLUMNS
            }
            for place in self._places
        ]

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Footnotes, each once, in the order of their numbers."""
        found = [trial.note for method, level in self._places for trial in self.section.of(method, level) if trial.note]
        return tuple(dict.fromkeys(found))

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One for each method and level that has a finished run."""
        rows = []
        for (method, level), plain in zip(self._places, self._plain, strict=True):
            trials = self.section.of(method, level)
            reached = spread([seconds_to(trial.result or {"rounds": []}, self.goal) for trial in trials])
            rows.append(
                Row(
                    method=method,
                    level=level,
                    label=", ".join(part for part in (method, self.section.level_text(level)) if part),
                    numbers={**plain, TARGET: reached},
                    notes=tuple(sorted({self.notes.index(trial.note) + 1 for trial in trials if trial.note})),
                )
            )
        return tuple(rows)

    def seeds_text(self) -> str:
        """How many seeds the means are over."""
        count = len(self.section.seeds)
        return f"mean ± sample deviation over {count} seeds" if count > 1 else "one seed"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: the content of `compare.json`."""
        return {
            "title": self.section.title,
            "methods": list(self.section.methods),
            "seeds": list(self.section.seeds),
            "target": self.goal,
            "trials": [self._trial(trial) for trial in self.section.finished],
            "failed": [{**_identity(trial), "error": trial.error} for trial in self.section.failed],
            "summary": {
                row.label: {name: asdict(found) for name, found in row.numbers.items()} for row in self.rows
            },
            "notes": {row.label: [self.notes[number - 1] for number in row.notes] for row in self.rows if row.notes},
        }  # fmt: skip

    def runs(self, method: str, level: Level) -> list[tuple[Trial, dict[str, float | None]]]:
        """Every finished run of a row, with its numbers by column name."""
        return [(trial, self._numbers(trial)) for trial in self.section.of(method, level)]

    def _numbers(self, trial: Trial) -> dict[str, float | None]:
        result = trial.result or {"rounds": []}
        return {**{column.name: value_of(result, column) for column in COLUMNS}, TARGET: seconds_to(result, self.goal)}

    def _trial(self, trial: Trial) -> dict[str, Any]:
        return {**_identity(trial), **self._numbers(trial)}

    def to_csv(self) -> str:
        """One line per finished trial."""
        text = io.StringIO()
        rows = [self._trial(trial) for trial in self.section.finished]
        writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else ["method", "seed"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def show(self, console: Console) -> None:
        """Print the table, cut into several where the console is too narrow, then footnotes and failures."""
        labels = [escape(f"{row.label} {row.signs}".strip()) for row in self.rows]
        texts = {column.name: [column.spread_text(row.numbers[column.name]) for row in self.rows] for column in self.columns}
        for part in self._parts(console.width, labels, texts):
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            table.add_column("method", no_wrap=True)
            for column in part:
                table.add_column(column.title, justify="right", no_wrap=True)
            for place, label in enumerate(labels):
                table.add_row(label, *(texts[column.name][place] for column in part))
            console.print(table)
        console.print(self.seeds_text())
        for number, note in enumerate(self.notes, 1):
            console.print(f"{str(number).translate(_SIGNS)} {escape(note)}", soft_wrap=True)
        for trial in self.section.failed:
            console.print(f"failed: {escape(self.section.name_of(trial))}: {escape(trial.error or '')}", soft_wrap=True)

    def _parts(self, width: int, labels: list[str], texts: Mapping[str, list[str]]) -> list[list[Column]]:
        """Columns in their order, as many per table as fit."""
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
    return {
        "method": trial.method,
        "seed": trial.seed,
        "heterogeneity": trial.level.heterogeneity,
        "lack_classes": trial.level.lack_classes,
    }
