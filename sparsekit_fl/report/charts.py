"""Charts: what a comparison is drawn as; `drawing` says how.

Accuracy against FLOPs, simulated time and rounds; bars per method; accuracy and time against the levels of heterogeneity.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sparsekit.errors import DataError
from sparsekit_fl.report.comparison import TARGET, Comparison
from sparsekit_fl.report.curves import Curve, curves_of, metrics_of
from sparsekit_fl.report.trials import Level

__all__ = ["Chart", "Series", "Unit", "charts_of", "curve_charts", "on_front"]

Unit = Literal["share", "flops", "seconds", "number"]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One method in a chart.

    Args:
        method: Name of the method.
        place: Its place among the methods of the section, which decides colour, dashes and marker in every chart.
        x: Numbers, or names of levels; a bar has none.
        y: As many.
        deviation: As many; zeros for a single run.
        second: Second value of a bar, drawn as a ring; None for none.
        subject: Drawn so that it is told from the rest.
        label: Text of the legend; empty for the method.
    """

    method: str
    place: int
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    deviation: tuple[float, ...]
    second: float | None = None
    subject: bool = False
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One picture.

    Args:
        name: Name of its file.
        title: Text above it.
        kind: "curve" and "level" are lines, "bar" is one bar per series, "front" is one point per series with a line through
            those that no other series beats in both numbers.
        series: Methods that are drawn.
        x: Text of the x axis; for bars that of their length.
        y: Text of the y axis; empty for bars.
        unit: Unit of x for curves, of the length for bars, of y for levels.
        y_unit: Unit of y for curves.
    """

    name: str
    title: str
    kind: Literal["curve", "level", "bar", "front"]
    series: tuple[Series, ...]
    x: str
    y: str
    unit: Unit
    y_unit: Unit = "share"


_ACCURACY = "mean personal accuracy on test data"
_CURVES: tuple[tuple[str, str, str, str, Unit], ...] = (
    ("accuracy-flops", "Accuracy against FLOPs", "FLOPs of all clients so far (compact submodels)", "flops", "flops"),
    ("accuracy-time", "Accuracy against simulated time", "simulated seconds so far", "seconds", "seconds"),
    ("accuracy-rounds", "Accuracy against rounds", "round", "rounds", "number"),
)
_BARS: tuple[tuple[str, str, str, Unit, str, str | None], ...] = (
    ("bars-accuracy", "Accuracy per method", "personal accuracy; ring: of the global model", "share",
     "personal_accuracy", "global_accuracy"),
    ("bars-flops", "FLOPs per method", "FLOPs, compact; ring: by the row-mask convention", "flops",
     "flops_compact", "flops_rowmask"),
    ("bars-time", "Simulated {target} accuracy", "seconds; no bar: never reached", "seconds", TARGET, None),
)  # fmt: skip
_AGAINST_DEVICES: tuple[tuple[str, str, str, str, Unit], ...] = (
    ("personal_accuracy", "accuracy", "Accuracy", _ACCURACY, "share"),
    ("simulated_seconds", "time", "Simulated time", "simulated seconds of the run", "seconds"),
    (TARGET, "target-time", "Time to the target", "simulated seconds to the target", "seconds"),
)


def charts_of(comparison: Comparison) -> list[Chart]:
    """Make every chart that a comparison has the data for.

    Args:
        comparison: Rows of the charts.
    """
    # What a comparison of levels was run for stands first.
    charts = _levels(comparison)
    section = comparison.section
    for level in section.levels:
        results = [trial.result for method in section.methods for trial in section.of(method, level) if trial.result]
        places = {method: place for place, method in enumerate(section.methods)}
        # A problem may have other metrics and no accuracy.
        scored = [curve for curve in curves_of(results) if len(curve.rounds)] if _has_accuracy(results) else []
        found = [
            _front(comparison, level),
            *curve_charts(scored, places, subject=comparison.subject),
            *_further(results, places, comparison.subject),
            *_bars(comparison, level),
        ]
        text = section.level_text(level)
        if text:
            slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
            found = [replace(chart, name=f"{chart.name}-{slug}", title=f"{chart.title} ({text})") for chart in found]
        charts += [chart for chart in found if _drawable(chart)]
    return charts


def _has_accuracy(results: Sequence[Mapping[str, Any]]) -> bool:
    return not results or "accuracy" in metrics_of(results)


def _further(results: Sequence[Mapping[str, Any]], places: Mapping[str, int], subject: str) -> list[Chart]:
    """Make the charts against rounds of all but mean personal accuracy: the global model, the worst tenth, other metrics."""
    wanted = [("accuracy", "global", "mean"), ("accuracy", "personal", "worst")] if _has_accuracy(results) else []
    others = [name for name in metrics_of(results) if name != "accuracy"]
    wanted += [(name, part, kind) for name in others for part, kind in (("personal", "mean"), ("personal", "worst"))]
    charts = []
    for metric, part, kind in wanted:
        known = [result for result in results if _scored(result, metric, part, kind)]
        try:
            curves = curves_of(known, metric=metric, part=part, kind=kind)
        except DataError:
            continue
        about = {"mean": "", "worst": ", worst tenth of the clients"}[kind]
        (chart,) = curve_charts(curves, places, subject=subject)[-1:]
        charts.append(
            replace(
                chart,
                name="-".join(filter(None, (re.sub(r"\W+", "-", metric), part if part != "personal" else "",
                                            kind if kind != "mean" else "", "rounds"))),
                title=f"{metric.replace('_', ' ').capitalize()} of the {part} model{about}, against rounds",
                y=f"{kind if kind == 'mean' else 'mean of the worst tenth,'} {part} {metric} on test data",
                y_unit="share" if metric == "accuracy" else "number",
            )
        )  # fmt: skip
    return charts


def _scored(result: Mapping[str, Any], metric: str, part: str, kind: str) -> bool:
    """Whether a run has this number more than once: a single one is no curve, and is in the table."""
    count = 0
    for record in result["rounds"]:
        scores = record["evaluation"] or {}
        count += ((scores if kind == "mean" else scores.get(kind) or {}).get(part) or {}).get(metric) is not None
    return count > 1


def _drawable(chart: Chart) -> bool:
    if chart.kind == "front":
        return len(chart.series) > 1
    return any(one.y if chart.kind == "bar" else len(one.x) > 1 for one in chart.series)


def _front(comparison: Comparison, level: Level) -> Chart:
    """Make the chart of final accuracy against FLOPs: a point per method."""
    series = []
    for row in comparison.rows:
        accuracy, flops = row.numbers["personal_accuracy"], row.numbers["flops_compact"]
        if row.level == level and accuracy.mean is not None and flops.mean:
            one = Series(
                method=row.method,
                place=comparison.section.methods.index(row.method),
                x=(flops.mean,),
                y=(accuracy.mean,),
                deviation=(accuracy.deviation or 0.0,),
                subject=row.method == comparison.subject,
            )
            series.append(one)
    x = "FLOPs, compact; dotted: no method is better in both"
    return Chart(
        name="front", title="Final accuracy against FLOPs", kind="front", series=tuple(series), x=x, y=_ACCURACY, unit="flops"
    )


def on_front(series: Sequence[Series]) -> tuple[Series, ...]:
    """Return the points that no other beats in both numbers, from few FLOPs to many.

    Args:
        series: One point each.
    """
    front: list[Series] = []
    for one in sorted(series, key=lambda one: (float(one.x[0]), -one.y[0])):
        if not front or one.y[0] > front[-1].y[0]:
            front.append(one)
    return tuple(front)


def curve_charts(
    curves: Sequence[Curve],
    places: Mapping[str, int],
    *,
    label: Callable[[Curve], str] = lambda curve: curve.method,
    subject: str = "",
) -> list[Chart]:
    """Make the charts of accuracy against FLOPs, simulated time and rounds, in this order.

    Args:
        curves: One per method.
        places: Method → place, which decides its style.
        label: Returns the legend's text for a curve.
        subject: Method that is told from the rest; empty for none.
    """
    charts = []
    for name, title, x, axis, unit in _CURVES:
        series = [
            Series(
                method=curve.method,
                place=places[curve.method],
                x=tuple(map(float, getattr(curve, axis))),
                y=tuple(map(float, curve.accuracy)),
                deviation=tuple(map(float, curve.deviation)),
                label=label(curve),
                subject=curve.method == subject,
            )
            for curve in curves
        ]
        known = tuple(one for one in series if all(math.isfinite(value) for value in one.x if isinstance(value, float)))
        charts.append(Chart(name=name, title=title, kind="curve", series=known, x=x, y=_ACCURACY, unit=unit))
    return charts


def _bars(comparison: Comparison, level: Level) -> list[Chart]:
    target = next(column.title for column in comparison.columns if column.name == TARGET)
    charts = []
    for name, title, x, unit, column, second in _BARS:
        series = []
        for row in comparison.rows:
            found = row.numbers[column]
            if row.level == level:
                one = Series(
                    method=row.method,
                    place=comparison.section.methods.index(row.method),
                    x=(),
                    y=() if found.mean is None else (found.mean,),
                    deviation=() if found.mean is None else (found.deviation or 0.0,),
                    second=row.numbers[second].mean if second else None,
                    subject=row.method == comparison.subject,
                )
                series.append(one)
        # The best stands above: the largest accuracy, the least of what is spent; those without a bar stand last.
        sign = -1.0 if unit == "share" else 1.0
        series.sort(key=lambda one: sign * one.y[0] if one.y else math.inf)
        charts.append(
            Chart(name=name, title=title.format(target=target), kind="bar", series=tuple(series), x=x, y="", unit=unit)
        )
    return charts


def _levels(comparison: Comparison) -> list[Chart]:
    """Make the charts against each axis of heterogeneity with several values, one for every value of the other."""
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
                    series=_along(comparison, along, column),
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
                series=_along(comparison, {str(lack): Level(device, lack) for lack in numbers}, "personal_accuracy"),
                x="classes that every client lacks",
                y=_ACCURACY,
                unit="share",
            )
        )
    return [chart for chart in charts if _drawable(chart)]


def _along(comparison: Comparison, levels: Mapping[str, Level], column: str) -> tuple[Series, ...]:
    """Return the series of each method over named levels."""
    found = {(row.method, row.level): row.numbers[column] for row in comparison.rows}
    series = []
    for place, method in enumerate(comparison.section.methods):
        points = [(name, found[method, level]) for name, level in levels.items() if (method, level) in found]
        known = [(name, value.mean, value.deviation or 0.0) for name, value in points if value.mean is not None]
        if known:
            x, y, deviation = zip(*known, strict=True)
            series.append(Series(method=method, place=place, x=x, y=y, deviation=deviation))
    return tuple(series)
