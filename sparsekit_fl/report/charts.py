"""Charts: what a comparison is drawn as; `drawing` says how.

Accuracy against FLOPs, simulated time and rounds; bars per method; those against levels of heterogeneity are in `levels`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparsekit.errors import DataError
from sparsekit_fl.report.chart import Chart, Series, Unit, on_front
from sparsekit_fl.report.comparison import TARGET, Comparison
from sparsekit_fl.report.curves import Curve, curves_of, metrics_of
from sparsekit_fl.report.levels import level_charts
from sparsekit_fl.report.trials import Level
from sparsekit_fl.results.scoring import FLOPS_LACK

__all__ = ["Chart", "Series", "charts_of", "curve_charts", "on_front"]

_ACCURACY = "mean personal accuracy on test data"
_FRONT = "FLOPs, compact; dotted: no method is better in both"
_CURVES: tuple[tuple[str, str, str, str, Unit], ...] = (
    ("accuracy-flops", "Accuracy against FLOPs", "FLOPs of all clients so far (compact submodels)", "flops", "flops"),
    ("accuracy-time", "Accuracy against simulated time", "simulated seconds so far", "seconds", "seconds"),
    ("accuracy-rounds", "Accuracy against rounds", "round", "rounds", "number"),
)
_BARS: tuple[tuple[str, str, str, Unit, str, str | None], ...] = (
    ("bars-accuracy", "Accuracy per method", "personal accuracy; ring: of the global model", "share",
     "personal_accuracy", "global_accuracy"),
    ("bars-flops", "FLOPs per method", "FLOPs, compact; ring: training alone, by the row-mask convention", "flops",
     "flops_compact", "flops_rowmask"),
    ("bars-time", "Simulated {target} accuracy", "seconds; no bar: never reached", "seconds", TARGET, None),
)  # fmt: skip


def charts_of(comparison: Comparison) -> list[Chart]:
    """Make every chart that a comparison has the data for.

    Args:
        comparison: Rows of the charts.
    """
    # What a comparison of levels was run for stands first.
    charts = level_charts(comparison)
    section = comparison.section
    for level in section.levels:
        results = [trial.result for method in section.methods for trial in section.of(method, level) if trial.result]
        places = comparison.places
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
                place=comparison.places[row.method],
                x=(flops.mean,),
                y=(accuracy.mean,),
                deviation=(accuracy.deviation or 0.0,),
                subject=row.method == comparison.subject,
            )
            series.append(one)
    # Both fit below the small picture of the page.
    lacking = FLOPS_LACK in comparison.notes
    x = "FLOPs, some without scoring; dotted: the Pareto front" if lacking else _FRONT
    title = "Pareto chart: final accuracy against FLOPs"
    return Chart(name="front", title=title, kind="front", series=tuple(series), x=x, y=_ACCURACY, unit="flops")


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
                    place=comparison.places[row.method],
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
