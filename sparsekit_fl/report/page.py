"""One HTML page of everything: tables that sort, charts whose methods can be hidden, and numbers of others beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sparsekit_fl.report.beside import Beside, Cell, Line, Sheet
from sparsekit_fl.report.comparison import Comparison, Row
from sparsekit_fl.report.drawing import series_style
from sparsekit_fl.report.table import Column
from sparsekit_fl.report.text import render

__all__ = ["PagePart", "page"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PagePart:
    """What the page shows of one protocol.

    Args:
        comparison: The table.
        beside: Numbers of others; None where there are none.
        charts: Title and SVG of each chart.
    """

    comparison: Comparison
    beside: Beside | None
    charts: Sequence[tuple[str, str]]

    @property
    def protocol(self) -> str:
        """Settings that all its runs have in common, in one line."""
        config = next((trial.config for trial in self.comparison.section.trials if trial.config), {})
        about, training = config.get("experiment", {}), config.get("training", {})
        options = {name: value for name, value in about.get("partition_options", {}).items() if name != "lack_classes"}
        parts = [
            f"{config['cohort']} clients a round" if "cohort" in config else "",
            f"{training['local_epochs']} local epochs of batches of {training['batch_size']}, learning rate {training['lr']:g}"
            if training
            else "",
            f"{about['partition']} partition" if about.get("partition") else "",
            ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in options.items()),
            f"capability {config['capability']}" if "capability" in config else "",
        ]
        return "; ".join(filter(None, parts))

    @property
    def chips(self) -> list[tuple[str, str, str]]:
        """Method, colour and dashes of each button that shows or hides a method."""
        shown = {row.method for row in self.comparison.rows}
        styles = [(method, *series_style(place)) for place, method in enumerate(self.comparison.section.methods)]
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
        """Return the largest accuracy; the least of anything that is spent has no honest winner, so it is not marked."""
        if column.unit != "share" or len(self.comparison.rows) < 2:
            return None
        return max((mean for row in self.comparison.rows if (mean := row.numbers[column.name].mean) is not None), default=None)


def page(parts: Sequence[PagePart]) -> str:
    """Write the page.

    Args:
        parts: One per protocol.

    Returns:
        HTML; equal parts give equal text.
    """
    title = parts[0].comparison.section.title if len(parts) == 1 else "Comparison of methods"
    return render("page.html", title=title, parts=parts)
