"""Plate: a figure of somebody else's paper, drawn from our results, with what it shows in words and in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsekit_fl.report.chart import Chart
from sparsekit_fl.report.text import render
from sparsekit_fl.results.extra import need

__all__ = ["MissingPlate", "Plate", "Plates", "plates_csv", "plates_latex"]


@dataclass(frozen=True, kw_only=True)
class Plate:
    """One figure.

    Args:
        number: For example "Figure 3".
        chart: What is drawn, with published numbers as marks.
        caption: Sentences: what was published, and what is found here.
    """

    number: str
    chart: Chart
    caption: str


@dataclass(frozen=True, kw_only=True)
class MissingPlate:
    """A figure that no result can be drawn as.

    Args:
        number: For example "Figure 6".
        needs: Runs that it takes, as a phrase behind "runs of".
        command: Command that makes them.
    """

    number: str
    needs: str
    command: str

    @property
    def text(self) -> str:
        """All of it in one line."""
        return f"left out: {self.number}, for which there are no runs of {self.needs}: {self.command}"


@dataclass(frozen=True, kw_only=True)
class Plates:
    """Figures of all comparisons of a report.

    Args:
        title: Heading above them.
        drawn: One sequence per comparison, in their order.
        missing: Those that none of the comparisons can show.
    """

    title: str
    drawn: Sequence[Sequence[Plate]]
    missing: Sequence[MissingPlate] = ()


def plates_csv(plates: Sequence[Plate]) -> str:
    """Return CSV with one line per point: figure, method, x, y, deviation, and whether it is ours or published.

    Args:
        plates: Figures of one comparison.

    Raises:
        MissingDependencyError: pandas is not installed.
    """
    lines: list[tuple[object, ...]] = []
    for plate in plates:
        chart = plate.chart
        about = (plate.number, chart.name, chart.x, chart.y or chart.x)
        for one in chart.series:
            name = one.label or one.method
            points = zip(one.x or ("",) * len(one.y), one.y, one.deviation, strict=True)
            lines += [(*about, name, "ours", x, y, deviation) for x, y, deviation in points]
            if one.second is not None:
                lines.append((*about, name, "published", "", one.second, 0.0))
        lines += [(*about, mark.method, "published", mark.x, mark.y, mark.deviation) for mark in chart.marks]
    columns = ["figure", "file", "x_axis", "y_axis", "series", "source", "x", "y", "deviation"]
    return str(need("pandas").DataFrame(lines, columns=columns, dtype=object).to_csv(index=False, lineterminator="\n"))


def plates_latex(plates: Sequence[Plate], *, folder: str, prefix: str = "") -> str:
    r"""Write a float of `\includegraphics` for each figure; it needs `\usepackage{graphicx}`.

    Args:
        plates: Figures of one comparison.
        folder: Folder of the pictures, from where the paper is set.
        prefix: Start of the names of their files.
    """
    return render("plates.tex", plates=plates, folder=folder, prefix=prefix)
