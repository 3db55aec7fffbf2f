"""Figures 6, 7 and 8: against the classes that clients lack, and against the heterogeneity of their devices."""

from __future__ import annotations

from dataclasses import replace

from sparsekit_fl.paper.figures.common import as_in_the_paper, is_rival, marks_at, own_method, plate_of, points_text
from sparsekit_fl.report.chart import Chart, Mark, Series
from sparsekit_fl.report.comparison import Comparison
from sparsekit_fl.report.levels import level_charts
from sparsekit_fl.report.plate import Plate

__all__ = ["accuracy_against_classes", "accuracy_against_devices", "time_against_devices"]

# Clients of MNIST and CIFAR-10 have two of ten classes in the tables, so they lack eight.
_PUBLISHED_LACK = {"mnist": "8", "cifar10": "8"}


def accuracy_against_classes(comparison: Comparison) -> Plate | None:
    """Make Figure 6; None where FedLPS and a rival have no two levels.

    Args:
        comparison: Results under one protocol.
    """
    lack = _PUBLISHED_LACK.get(comparison.section.dataset)
    marks = marks_at(comparison, lack) if lack else ()
    return _figure(comparison, "accuracy-classes", "Figure 6", "paper-6-accuracy-classes",
                   "test accuracy against non-IID levels", marks)  # fmt: skip


def accuracy_against_devices(comparison: Comparison) -> Plate | None:
    """Make Figure 7; None where FedLPS and a rival have no two levels.

    Args:
        comparison: Results under one protocol.
    """
    return _figure(comparison, "accuracy-heterogeneity", "Figure 7", "paper-7-accuracy-heterogeneity",
                   "test accuracy against system heterogeneity", marks_at(comparison, "high"))  # fmt: skip


def time_against_devices(comparison: Comparison) -> Plate | None:
    """Make Figure 8; None where FedLPS and a rival have no two levels.

    Args:
        comparison: Results under one protocol.
    """
    return _figure(comparison, "time-heterogeneity", "Figure 8", "paper-8-time-heterogeneity",
                   "running time against system heterogeneity", ())  # fmt: skip


def _figure(comparison: Comparison, start: str, number: str, name: str, title: str, marks: tuple[Mark, ...]) -> Plate | None:
    found = [chart for chart in level_charts(comparison) if chart.name.startswith(start)]
    # Of several the last is that of the largest other axis: the paper's.
    chart = next((chart for chart in reversed(found)), None)
    own = None if chart is None else next((one for one in chart.series if one.method == own_method(comparison)), None)
    if chart is None or own is None or len(own.x) < 2 or not any(is_rival(one.method) for one in chart.series):
        return None
    there = {x for one in chart.series for x in one.x}
    chart = replace(chart, name=name, title=title, marks=tuple(mark for mark in marks if mark.x in there))
    chart = as_in_the_paper(comparison, chart)
    return plate_of(comparison, number, chart, _times(own, chart) if chart.unit == "seconds" else _leads(own, chart))


def _rivals_at(chart: Chart, level: float | str) -> dict[str, float]:
    """Method → y of the rivals that have a run at a level."""
    return {one.method: one.y[one.x.index(level)] for one in chart.series if is_rival(one.method) and level in one.x}


def _leads(own: Series, chart: Chart) -> str:
    leads = [
        (str(level), y - max(others.values()))
        for level, y in zip(own.x, own.y, strict=True)
        if (others := _rivals_at(chart, level))
    ]
    return f"{own.method} less the best rival, in points: {points_text(leads)}."


def _times(own: Series, chart: Chart) -> str:
    parts = []
    for level, y in zip(own.x, own.y, strict=True):
        others = _rivals_at(chart, level)
        if others:
            shares = sorted(100 * (1 - y / seconds) for seconds in others.values())
            parts.append(f"{shares[0]:.0f} to {shares[-1]:.0f} % ({level})".replace("-", "−"))
    growth = 100 * (own.y[-1] / own.y[0] - 1)
    change = f"{growth:+.0f} %".replace("-", "−")
    shorter = f"{own.method} is shorter than its rivals by {', '.join(parts)}"
    return f"{shorter}; from {own.x[0]} to {own.x[-1]} its own time changes by {change}."
