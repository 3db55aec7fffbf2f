"""One HTML page of everything: tables that sort, figures, and published numbers beside ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sparsekit_fl.results.extra import need
from sparsekit_fl.results.report.columns import Column
from sparsekit_fl.results.report.comparison import Comparison, Row
from sparsekit_fl.results.report.plots import Figure
from sparsekit_fl.results.text import flops_text, share_text

_NEAR = 0.01
_OPTIONS = {
    "classes_per_client": "{} classes a client",
    "images_per_class": "{} images a shard",
    "alpha": "Dirichlet α = {:g}",
}
_DISTINCT = {False: "shards of a client may share a class", True: "shards of a client have different classes"}


class _Cell(NamedTuple):
    """Text of a cell, what the column is sorted by (None stays last), small text behind it, and a class of CSS."""

    text: str
    value: float | str | None = None
    small: str = ""
    mark: str = ""


class _Line(NamedTuple):
    """A line of a table: the method, words below its name, numbers of footnotes, and its cells."""

    method: str
    below: str
    notes: tuple[int, ...]
    cells: list[_Cell]


class _Sheet(NamedTuple):
    """A table: titles of its columns, the last of which is prose where `prose` is set."""

    titles: list[str]
    lines: list[_Line]
    prose: bool = False


@dataclass(frozen=True, eq=False)
class Part:
    """What the page shows of one protocol.

    Args:
        comparison: The table.
        published: Published numbers beside ours; None where there are none.
        drawn: Figures and their pictures, SVG in base64.
        csv: File name of the numbers, beside the page.
        command: What was typed; empty where it is not known.
    """

    comparison: Comparison
    published: Any
    drawn: Sequence[tuple[Figure, str]]
    csv: str = ""
    command: str = ""

    @property
    def protocol(self) -> str:
        """Settings that all its runs have in common, in one line."""
        config = self.comparison.config
        about, training = config.get("experiment", {}), config.get("training", {})
        parts = [f"{config['cohort']} clients a round"] if "cohort" in config else []
        if training:
            parts.append(f"{training['local_epochs']} local epochs of batches of {training['batch_size']}")
            parts.append(f"learning rate {training['lr']:g}")
        parts += [f"{about['partition']} partition"] if about.get("partition") else []
        for name, value in about.get("partition_options", {}).items():
            if name == "distinct":
                parts.append(_DISTINCT[bool(value)])
            elif name != "lack_classes":
                parts.append(_OPTIONS[name].format(value) if name in _OPTIONS else f"{name.replace('_', ' ')}: {value}")
        parts += [f"capability {config['capability']}"] if "capability" in config else []
        return "; ".join(parts)

    @property
    def headline(self) -> str:
        """What the table says, in one sentence."""
        known = [
            (row.label, row.mean["personal_accuracy"], row.mean["flops_compact"])
            for row in self.comparison.rows
            if not math.isnan(row.mean["personal_accuracy"]) and row.mean["flops_compact"] > 0
        ]
        if len(known) < 2:
            return ""
        best = max(known, key=lambda one: one[1])
        near = min((one for one in known if one[1] >= best[1] - _NEAR), key=lambda one: one[2])
        first = f"{best[0]} is most accurate: {share_text(best[1])} with {flops_text(best[2])} FLOPs"
        if near[0] == best[0]:
            return f"{first}, and nothing within a point of it costs less."
        return (
            f"{first}. {near[0]} comes within a point, {share_text(near[1])}, with {flops_text(near[2])}, the fewest that do."
        )

    @property
    def origin(self) -> str:
        """Version and date of the runs, as far as their results have them."""
        known = [trial.result.get("environment", {}) for trial in self.comparison.finished if trial.result]
        versions = sorted({str(one["sparsekit"]) for one in known if "sparsekit" in one})
        dates = sorted({str(one["finished"])[:10] for one in known if "finished" in one})
        when = " to ".join([dates[0], dates[-1]] if len(dates) > 1 else dates)
        return ", ".join(filter(None, [f"sparsekit {' and '.join(versions)}" if versions else "", when]))

    @property
    def table(self) -> _Sheet:
        """Means and deviations."""
        columns = self.comparison.columns
        best = {column.name: self._best(column) for column in columns}
        lines = []
        for row in self.comparison.rows:
            cells = [_Cell(row.runs, row.n, mark="flag" if row.n < row.of else "")]
            for column in columns:
                mean = row.mean[column.name]
                text, sign, rest = row.text[column.name].partition(" ± ")
                mark = "best" if mean == best[column.name] else ""
                cells.append(_Cell(text, None if math.isnan(mean) else mean, (sign + rest).strip(), mark))
            lines.append(_Line(row.method, row.level, row.notes, cells))
        return _Sheet(["method", "n", *(column.title for column in columns)], lines)

    @property
    def beside(self) -> _Sheet:
        """The published tables beside ours."""
        lines = []
        for _, pair in self.published.groupby(["table", "run"], sort=False):
            accuracy, flops = pair.itertuples()
            why = dict.fromkeys(filter(None, (accuracy.reason, flops.reason)))
            cells = [
                _Cell(accuracy.method, accuracy.method),
                _Cell(f"{accuracy.published:.2f}", accuracy.published, f"± {accuracy.published_deviation:.2f}"),
                _Cell(f"{accuracy.ours:.2f}", accuracy.ours, _spread(accuracy.our_deviation, 2)),
                _Cell(f"{accuracy.difference:+.2f}", accuracy.difference, mark="flag" if accuracy.flagged else ""),
                _Cell(f"{flops.published:,.1f}", flops.published),
                _Cell(f"{flops.ours:,.3f}", flops.ours, _spread(flops.our_deviation, 3), "flag" if flops.flagged else ""),
                _Cell(" ".join(why), mark="text"),
            ]
            lines.append(_Line(accuracy.run, "", (), cells))
        titles = ["run", "published as", "published, %", "ours, %", "difference", "published, 10¹² FLOPs", "ours, row mask"]
        return _Sheet([*titles, "why they differ"], lines, prose=True)

    def _best(self, column: Column) -> float | None:
        """Return the largest accuracy, or the least that is spent; wall time depends on the machine and is not marked."""
        rows: Sequence[Row] = self.comparison.rows
        if column.name == "wall_seconds" or len(rows) < 2:
            return None
        means = [mean for row in rows if not math.isnan(mean := row.mean[column.name])]
        return (max if column.larger else min)(means, default=None)


def _spread(deviation: float | None, decimals: int) -> str:
    return "" if not deviation else f"± {deviation:,.{decimals}f}"


def page(parts: Sequence[Part], about_paper: Sequence[str] = ()) -> str:
    """Write the page.

    Args:
        parts: One per protocol.
        about_paper: Sentences for its end.

    Returns:
        HTML; equal parts give equal text.

    Raises:
        MissingDependencyError: Jinja2 is not installed.
    """
    jinja = need("jinja2")
    environment = jinja.Environment(
        loader=jinja.PackageLoader(__package__), autoescape=True, undefined=jinja.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    title = parts[0].comparison.title if len(parts) == 1 else "Comparison of methods"
    return str(environment.get_template("page.html.j2").render(title=title, parts=parts, about_paper=about_paper))
