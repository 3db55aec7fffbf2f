"""What the figures share: who the rivals are, the level that was published, published marks, and words about the setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparsekit_fl.paper.published import PUBLISHED_LEVELS, protocol_difference, published_numbers, published_text
from sparsekit_fl.report.chart import Chart, Mark
from sparsekit_fl.report.comparison import Comparison
from sparsekit_fl.report.plate import Plate
from sparsekit_fl.report.table import seconds_text
from sparsekit_fl.report.trials import Level

__all__ = [
    "as_in_the_paper",
    "highlighted",
    "is_rival",
    "level_of_figure",
    "marks_at",
    "own_method",
    "plate_of",
    "points_text",
    "rivals",
    "short_seconds",
]

_MOST = 6
_ABLATIONS = ("flst", "rcr-fix", "rcr-dyn", "p-ucbv-fix", "p-ucbv-dyn")


def is_rival(method: str) -> bool:
    """Whether a method is neither FedLPS nor a variant of it.

    Args:
        method: Name of a run, with options in brackets where they were changed.
    """
    return not (method.startswith("fedlps") or method.partition("[")[0] in _ABLATIONS)


def rivals(comparison: Comparison) -> list[str]:
    """Return the methods that are no variant of FedLPS."""
    return [method for method in comparison.section.methods if is_rival(method)]


def own_method(comparison: Comparison) -> str | None:
    """Return FedLPS, or the first variant of it; None where there is none."""
    methods = comparison.section.methods
    return "fedlps" if "fedlps" in methods else next((method for method in methods if not is_rival(method)), None)


def level_of_figure(comparison: Comparison) -> Level | None:
    """Return the level that the paper's figures are at, or the only one; None where there are several others."""
    levels = comparison.section.levels
    return next((level for level in PUBLISHED_LEVELS if level in levels), levels[0] if len(levels) == 1 else None)


def marks_at(comparison: Comparison, x: str | None = None) -> tuple[Mark, ...]:
    """Return the published accuracies of the comparison's methods, one for each published row.

    Args:
        comparison: Ours.
        x: Name of the level at which they stand; None places them at their published FLOPs.

    Returns:
        No mark where rounds or clients differ from the paper's.
    """
    if protocol_difference(comparison):
        return ()
    found: dict[tuple[float, ...], Mark] = {}
    # FedLPS has several runs of one published row; ours stands first.
    for method in sorted(comparison.section.methods, key=lambda method: method != own_method(comparison)):
        numbers = published_numbers(method, comparison.section.dataset)
        if numbers is not None:
            accuracy, deviation, flops = numbers
            mark = Mark(method=method, place=comparison.places[method], x=flops * 1e12 if x is None else x,
                        y=accuracy / 100, deviation=deviation / 100)  # fmt: skip
            found.setdefault(numbers, mark)
    return tuple(found.values())


def plate_of(comparison: Comparison, number: str, chart: Chart, found: str) -> Plate:
    """Make a plate whose caption has what was published, what was found, and how far the setting is the paper's.

    Args:
        comparison: Ours.
        number: Number of the figure.
        chart: What is drawn.
        found: Sentences with our numbers.
    """
    says = published_text(number, comparison.section.dataset).get("says", "")
    parts = [
        f"The paper: {says}" if says else "",
        f"Here: {found}" if found else "",
        "Diamonds are published numbers." if chart.marks else "",
        f"{comparison.seeds_text().capitalize()}; {comparison.section.title}. {_setting(comparison)}".strip(),
    ]
    return Plate(
        number=number,
        chart=replace(chart, title=f"{number}: {chart.title}", legend=True),
        caption=" ".join(filter(None, parts)),
    )


def as_in_the_paper(comparison: Comparison, chart: Chart) -> Chart:
    """Keep FedLPS and its rivals alone, the highlighted ones in colours that do not repeat and the others in grey.

    Args:
        comparison: Ours.
        chart: A chart of methods.
    """
    own = own_method(comparison)
    shown = highlighted(comparison)
    first = sorted(filter(shown.__contains__, comparison.section.methods), key=lambda method: method != own)
    places = {method: place for place, method in enumerate(dict.fromkeys([*first, *(one.method for one in chart.series)]))}
    series = tuple(
        replace(one, place=places[one.method], faint=one.method not in first, subject=one.method == own)
        for one in chart.series
        if one.method == own or is_rival(one.method)
    )
    marks = tuple(replace(mark, place=places[mark.method]) for mark in chart.marks if mark.method in first)
    return replace(chart, series=series, marks=marks)


def highlighted(comparison: Comparison) -> frozenset[str]:
    """Return FedLPS, FedAvg, the front of accuracy against FLOPs among FedLPS and its rivals, and the most accurate rivals.

    Args:
        comparison: Ours.
    """
    own = own_method(comparison)
    points: dict[str, tuple[float, float]] = {}
    for row in comparison.rows:
        accuracy, flops = row.numbers["personal_accuracy"].mean, row.numbers["flops_compact"].mean
        if accuracy is not None and flops is not None and (row.method == own or is_rival(row.method)):
            points.setdefault(row.method, (flops, -accuracy))
    front: list[str] = []
    for method in sorted(points, key=lambda method: points[method]):
        if not front or points[method][1] < points[front[-1]][1]:
            front.append(method)
    always = [method for method in (own, "fedavg") if method in points]
    ranked = sorted(points, key=lambda method: points[method][1])
    wanted = list(dict.fromkeys([*always, *front, *ranked]))
    return frozenset(wanted[: max(_MOST, len({*always, *front}))])


def _setting(comparison: Comparison) -> str:
    """Say where the runs are not the paper's; empty where clients and rounds are."""
    if published_numbers("fedlps", comparison.section.dataset) is None:
        return f"The paper has no {comparison.section.dataset or 'such'} data."
    return protocol_difference(comparison)


def short_seconds(seconds: float) -> str:
    """Write seconds with two digits behind the point where they matter."""
    return f"{seconds:.2f} s" if seconds < 10 else seconds_text(seconds)


def points_text(differences: Sequence[tuple[str, float]]) -> str:
    """Write differences of accuracies in points: `+1.2 (low), −0.3 (high)`.

    Args:
        differences: Name and difference in [−1, 1] of each.
    """
    return ", ".join(f"{100 * value:+.1f} ({name})".replace("-", "−") for name, value in differences)
