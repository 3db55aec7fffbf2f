"""Charts against levels of heterogeneity: of the devices, and of the classes that clients lack."""

from __future__ import annotations

from collections.abc import Mapping

from sparsekit_fl.report.chart import Chart, Series, Unit
from sparsekit_fl.report.comparison import TARGET, Comparison
from sparsekit_fl.report.trials import Level

__all__ = ["along_levels", "level_charts"]

_ACCURACY = "mean personal accuracy on test data"
_AGAINST_DEVICES: tuple[tuple[str, str, str, str, Unit], ...] = (
    ("personal_accuracy", "accuracy", "Accuracy", _ACCURACY, "share"),
    ("simulated_seconds", "time", "Simulated time", "simulated seconds of the run", "seconds"),
    (TARGET, "target-time", "Time to the target", "simulated seconds to the target", "seconds"),
)


def level_charts(comparison: Comparison) -> list[Chart]:
    """Make the charts against each axis of heterogeneity with several values, one for every value of the other.

    Args:
        comparison: Rows of the charts.
    """
    levels = comparison.section.levels
    devices = list(dict.fromkeys(level.heterogeneity for level in levels))
    named = [device for device in devices if device]
    lacks = list(dict.fromkeys(level.lack_classes for level in sorted(levels, key=lambda level: level.order[1])))
    numbers = [lack for lack in lacks if lack is not None]
    charts = []
    for lack in lacks if len(named) > 1 else ():
        along = {name: Level(name, lack) for name in named}
        several = lack is not None and len(lacks) > 1
        for column, name, title, y, unit in _AGAINST_DEVICES:
            charts.append(
                Chart(
                    name=f"{name}-heterogeneity" + (f"-lacks-{lack}" if several else ""),
                    title=f"{title} against system heterogeneity" + (f", clients lack {lack} classes" if several else ""),
                    kind="level",
                    series=along_levels(comparison, along, column),
                    x="heterogeneity of the devices",
                    y=y,
                    unit=unit,
                )
            )
    for device in devices if len(numbers) > 1 else ():
        several = len(devices) > 1
        charts.append(
            Chart(
                name="accuracy-classes" + (f"-{device}" if several else ""),
                title="Accuracy against non-IID level" + (f", heterogeneity {device}" if several else ""),
                kind="level",
                series=along_levels(comparison, {str(lack): Level(device, lack) for lack in numbers}, "personal_accuracy"),
                x="classes that every client lacks",
                y=_ACCURACY,
                unit="share",
            )
        )
    return [chart for chart in charts if any(len(one.x) > 1 for one in chart.series)]


def along_levels(comparison: Comparison, levels: Mapping[str, Level], column: str) -> tuple[Series, ...]:
    """Return the series of each method over named levels.

    Args:
        comparison: Rows of the chart.
        levels: Name on the axis → level, in the order of the axis.
        column: Name of a column of the table.
    """
    found = {(row.method, row.level): row.numbers[column] for row in comparison.rows}
    series = []
    for method in comparison.section.methods:
        points = [(name, found[method, level]) for name, level in levels.items() if (method, level) in found]
        known = [(name, value.mean, value.deviation or 0.0) for name, value in points if value.mean is not None]
        if known:
            x, y, deviation = zip(*known, strict=True)
            series.append(
                Series(
                    method=method,
                    place=comparison.places[method],
                    x=x,
                    y=y,
                    deviation=deviation,
                    subject=method == comparison.subject,
                )
            )
    return tuple(series)
