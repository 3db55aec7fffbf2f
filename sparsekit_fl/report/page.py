"""One HTML page of everything: tables that sort, charts whose methods can be hidden, and numbers of others beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sparsekit_fl.report.beside import Beside, Cell, Line, Sheet
from sparsekit_fl.report.comparison import Comparison, Row
from sparsekit_fl.report.drawing import series_style
from sparsekit_fl.report.plate import Plates
from sparsekit_fl.report.table import Column, flops_text, share_text
from sparsekit_fl.report.text import render

__all__ = ["PageFigure", "PagePart", "page"]

_NEAR = 0.01
_CAPABILITY = {
    "dynamic": "capabilities drawn anew every round",
    "fixed": "capabilities drawn once",
}
_OPTIONS = {
    "classes_per_client": "{} classes a client",
    "images_per_class": "{} images a shard",
    "alpha": "Dirichlet α = {:g}",
}
_DISTINCT = {False: "shards of a client may share a class", True: "shards of a client have different classes"}


def _option_text(name: str, value: Any) -> str:
    """Say an option of a partition in words; one that is not known as `name: value`."""
    if name == "distinct":
        return _DISTINCT[bool(value)]
    known = _OPTIONS.get(name)
    return known.format(value) if known else f"{name.replace('_', ' ')}: {value}"


@dataclass(frozen=True, kw_only=True)
class PageFigure:
    """A chart on the page.

    Args:
        title: Text above it.
        kind: As in `Chart`.
        svg: The picture.
        caption: Text below a figure of somebody else's paper; empty for other charts.
    """

    title: str
    kind: str
    svg: str
    caption: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class PagePart:
    """What the page shows of one protocol.

    Args:
        comparison: The table.
        beside: Numbers of others; None where there are none.
        figures: Charts, then the figures of somebody else's paper.
        csv: File name of the numbers, beside the page.
        command: What was typed; empty where it is not known.
    """

    comparison: Comparison
    beside: Beside | None
    figures: Sequence[PageFigure]
    csv: str = ""
    command: str = ""

    @property
    def charts(self) -> list[PageFigure]:
        """Charts of the comparison."""
        return [one for one in self.figures if not one.caption]

    @property
    def plates(self) -> list[PageFigure]:
        """Figures of somebody else's paper."""
        return [one for one in self.figures if one.caption]

    @property
    def protocol(self) -> str:
        """Settings that all its runs have in common, in one line."""
        config = next((trial.config for trial in self.comparison.section.trials if trial.config), {})
        about, training = config.get("experiment", {}), config.get("training", {})
        options = {name: value for name, value in about.get("partition_options", {}).items() if name != "lack_classes"}
        rounds = f", {config['rounds']} round{'' if config['rounds'] == 1 else 's'}" if "rounds" in config else ""
        parts = [
            f"{config['cohort']} clients a round{rounds}" if "cohort" in config else "",
            f"{training['local_epochs']} local epochs of batches of {training['batch_size']}, learning rate {training['lr']:g}"
            if training
            else "",
            f"{about['partition']} partition" if about.get("partition") else "",
            ", ".join(_option_text(name, value) for name, value in options.items()),
            _CAPABILITY.get(config.get("capability", ""), f"capability {config.get('capability')}")
            if "capability" in config
            else "",
        ]
        return "; ".join(filter(None, parts))

    @property
    def headline(self) -> str:
        """What the table says, in one sentence."""
        found = [
            (row.label, accuracy, flops)
            for row in self.comparison.rows
            if (accuracy := row.numbers["personal_accuracy"].mean) is not None and (flops := row.numbers["flops_compact"].mean)
        ]
        if len(found) < 2:
            return ""
        best = max(found, key=lambda one: one[1])
        near = min((one for one in found if one[1] >= best[1] - _NEAR), key=lambda one: one[2])
        first = f"{best[0]} is most accurate: {share_text(best[1])} with {flops_text(best[2])} FLOPs"
        if near[0] == best[0]:
            return f"{first}, and nothing within a point of it costs less."
        return (
            f"{first}. {near[0]} comes within a point, {share_text(near[1])}, with {flops_text(near[2])}, the fewest that do."
        )

    @property
    def origin(self) -> str:
        """Version and date of the runs, as far as their results have them."""
        known = [trial.result.get("environment", {}) for trial in self.comparison.section.finished if trial.result]
        versions = sorted({str(one["sparsekit"]) for one in known if "sparsekit" in one})
        dates = sorted(str(one["finished"])[:10] for one in known if "finished" in one)
        when = "" if not dates else dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        return ", ".join(filter(None, [f"sparsekit {' and '.join(versions)}" if versions else "", when]))

    @property
    def first(self) -> frozenset[str]:
        """Methods whose lines are drawn at first."""
        return frozenset(self.comparison.highlighted)

    @property
    def chips(self) -> list[tuple[str, str, str]]:
        """Method, colour and dashes of each button that shows or hides a method."""
        shown = {row.method for row in self.comparison.rows}
        styles = [(method, *series_style(place)) for method, place in self.comparison.places.items()]
        return [
            (method, colour, " ".join(f"{2 * length:g}" for length in dashes))
            for method, colour, dashes, _ in styles
            if method in shown
        ]

    @cached_property
    def table(self) -> Sheet | None:
        """Means and deviations; None where no run is finished."""
        columns = self.comparison.columns
        best = {column.name: self._best(column) for column in columns}
        lines = []
        for row in self.comparison.rows:
            cells = []
            for column in columns:
                found = row.numbers[column.name]
                text, sign, rest = column.spread_text(found).partition(" ± ")
                wins = found.mean is not None and found.mean == best[column.name]
                cells.append(Cell(text, found.mean, (sign + rest).strip(), "best" if wins else ""))
            lines.append(self._line(row, cells))
        return (
            Sheet(words=("method",), numbers=tuple(column.title for column in columns), lines=tuple(lines)) if lines else None
        )

    @property
    def runs(self) -> Sheet:
        """Every single run."""
        comparison, columns = self.comparison, self.comparison.columns
        lines = []
        for row in sorted(comparison.rows, key=lambda row: comparison.section.methods.index(row.method)):
            for trial in comparison.section.of(row.method, row.level):
                numbers = comparison.numbers(trial)
                cells = [Cell(column.text(numbers[column.name]), numbers[column.name]) for column in columns]
                lines.append(self._line(row, [Cell(str(trial.seed), trial.seed), *cells], notes=False))
        titles = ("seed", *(column.title for column in columns))
        return Sheet(words=("method",), numbers=titles, lines=tuple(lines))

    def _line(self, row: Row, cells: Sequence[Cell], *, notes: bool = True) -> Line:
        below = self.comparison.section.level_text(row.level)
        value = ", ".join(filter(None, (row.method, below)))
        return Line(
            method=row.method, name=row.method, value=value, below=below, notes=row.notes if notes else (), cells=tuple(cells)
        )

    def _best(self, column: Column) -> float | None:
        """Return the largest accuracy, or the least that is spent; wall time depends on the machine and is not marked."""
        if column.name == "wall_seconds" or len(self.comparison.rows) < 2:
            return None
        means = [mean for row in self.comparison.rows if (mean := row.numbers[column.name].mean) is not None]
        choose = max if column.unit == "share" or column.larger else min
        return choose(means, default=None)


def page(parts: Sequence[PagePart], *, plates: Plates) -> str:
    """Write the page.

    Args:
        parts: One per protocol.
        plates: Heading above the figures of somebody else's paper, and those that are missing.

    Returns:
        HTML; equal parts give equal text.
    """
    title = parts[0].comparison.section.title if len(parts) == 1 else "Comparison of methods"
    return render("page.html", title=title, parts=parts, plates=plates)
