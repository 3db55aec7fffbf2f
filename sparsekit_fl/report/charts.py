"""Charts: what a comparison is drawn as; `drawing` says how.

Accuracy against FLOPs, simulated time and rounds; bars per method; accuracy and time against the levels of heterogeneity.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sparsekit_fl.report.comparison import Comparison, Row
from sparsekit_fl.report.figure import curves_of
from sparsekit_fl.report.table import Spread
from sparsekit_fl.report.trials import Level

__all__ = ["Chart", "Series", "Unit", "charts_of"]

Unit = Literal["share", "flops", "seconds", "number"]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One method in a chart.

    Args:
        method: Its name.
        place: Among the methods of the section; decides colour, dashes and marker in every chart.
        x: Numbers, or names of levels; a bar has none.
        y: As many.
        deviation: As many; zeros for a single run.
        second: Of a bar: another value, drawn as a ring; None for none.
    """

    method: str
    place: int
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    deviation: tuple[float, ...]
    second: float | None = None


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One picture.

    Args:
        name: Of its file.
        title: Above it.
        kind: "curve" and "level" are lines, "bar" is one bar per series.
        series: What is drawn.
        x: What the x axis shows; of a bar: what its length shows.
        y: What the y axis shows; empty for bars.
        unit: Of x for curves, of the length for bars, of y for levels.
    """

    name: str
    title: str
    kind: Literal["curve", "level", "bar"]
    series: tuple[Series, ...]
    x: str
    y: str
    unit: Unit


def charts_of(comparison: Comparison) -> list[Chart]:
    """Every chart that a comparison has the data for.

    Args:
        comparison: With at least one row.
    """
    # What a comparison of levels was run for stands first.
    charts = _levels(comparison)
    for level in comparison.section.levels:
        charts += _curves(comparison, level) + _bars(comparison, level)
    return charts


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _named(comparison: Comparison, name: str, title: str, level: Level) -> tuple[str, str]:
    text = comparison.section.level_text(level)
    return (f"{name}-{_slug(text)}", f"{title} ({text})") if text else (name, title)


_ACCURACY = "mean personal accuracy on test data"


def _curves(comparison: Comparison, level: Level) -> list[Chart]:
    section = comparison.section
    results = [trial.result for method in section.methods for trial in section.of(method, level) if trial.result is not None]
    curves = [curve for curve in curves_of(results) if len(curve.rounds)] if results else []
    kinds: tuple[tuple[str, str, str, Unit, Callable[[Any], Any]], ...] = (
        ("accuracy-flops", "Accuracy against FLOPs", "FLOPs of all clients so far (compact submodels)", "flops", _flops),
        ("accuracy-time", "Accuracy against simulated time", "simulated seconds so far", "seconds", _seconds),
        ("accuracy-rounds", "Accuracy against rounds", "round", "number", _rounds),
    )
    charts = []
    for name, title, x, unit, read in kinds:
        series = tuple(
            Series(
                method=curve.method,
                place=section.methods.index(curve.method),
                x=tuple(map(float, read(curve))),
                y=tuple(map(float, curve.accuracy)),
                deviation=tuple(map(float, curve.deviation)),
            )
            for curve in curves
            if all(math.isfinite(value) for value in read(curve))
        )
        if any(len(one.x) > 1 for one in series):
            name, title = _named(comparison, name, title, level)
            charts.append(Chart(name=name, title=title, kind="curve", series=series, x=x, y=_ACCURACY, unit=unit))
    return charts


def _flops(curve: Any) -> Any:
    return curve.flops


def _seconds(curve: Any) -> Any:
    return curve.seconds


def _rounds(curve: Any) -> Any:
    return curve.rounds


def _bars(comparison: Comparison, level: Level) -> list[Chart]:
    rows = [row for row in comparison.rows if row.level == level]
    time = next(column for column in comparison.columns if column.name == "target_seconds")
    kinds: tuple[tuple[str, str, str, Unit, str, str | None], ...] = (
        ("bars-accuracy", "Accuracy per method", "personal accuracy; ring: of the global model", "share",
         "personal_accuracy", "global_accuracy"),
        ("bars-flops", "FLOPs per method", "FLOPs, compact; ring: by the row-mask convention", "flops",
         "flops_compact", "flops_rowmask"),
        ("bars-time", f"Simulated {time.title} accuracy", "seconds; no bar: never reached", "seconds", time.name, None),
    )  # fmt: skip
    charts = []
    for name, title, x, unit, column, second in kinds:
        series = tuple(_bar(comparison, row, row.numbers[column], row.numbers[second] if second else None) for row in rows)
        if any(one.y for one in series):
            name, title = _named(comparison, name, title, level)
            charts.append(Chart(name=name, title=title, kind="bar", series=series, x=x, y="", unit=unit))
    return charts


def _bar(comparison: Comparison, row: Row, found: Spread, second: Spread | None) -> Series:
    there = found.mean is not None
    return Series(
        method=row.method,
        place=comparison.section.methods.index(row.method),
        x=(),
        y=(found.mean,) if found.mean is not None else (),
        deviation=(found.deviation or 0.0,) if there else (),
        second=None if second is None else second.mean,
    )


_AGAINST_DEVICES: tuple[tuple[str, str, str, str, Unit], ...] = (
    ("personal_accuracy", "accuracy", "Accuracy", _ACCURACY, "share"),
    ("simulated_seconds", "time", "Simulated time", "simulated seconds of the run", "seconds"),
    ("target_seconds", "target-time", "Time to the target", "simulated seconds to the target", "seconds"),
)


def _levels(comparison: Comparison) -> list[Chart]:
    """Against each axis of heterogeneity that has several values, for every value of the other."""
    levels = comparison.section.levels
    devices = list(dict.fromkeys(level.heterogeneity for level in levels if level.heterogeneity))
    lacks = list(dict.fromkeys(level.lack_classes for level in sorted(levels, key=lambda level: level.order[1])))
    charts = []
    if len(devices) > 1:
        for lack in lacks:
            along = [Level(name, lack) for name in devices]
            more = f", clients lack {lack} classes" if lack is not None and len(lacks) > 1 else ""
            for column, name, title, y, unit in _AGAINST_DEVICES:
                series = _along(comparison, along, list(devices), column)
                charts.append(
                    Chart(
                        name=f"{name}-heterogeneity" + (f"-lacks-{lack}" if more else ""),
                        title=f"{title} against system heterogeneity{more}",
                        kind="level",
                        series=series,
                        x="heterogeneity of the devices",
                        y=y,
                        unit=unit,
                    )
                )
    numbers = [lack for lack in lacks if lack is not None]
    if len(numbers) > 1:
        for device in dict.fromkeys(level.heterogeneity for level in levels):
            more = f", heterogeneity {device}" if len(devices) > 1 else ""
            series = _along(comparison, [Level(device, lack) for lack in numbers], list(map(str, numbers)), "personal_accuracy")
            charts.append(
                Chart(
                    name="accuracy-classes" + (f"-{device}" if more else ""),
                    title=f"Accuracy against non-IID level{more}",
                    kind="level",
                    series=series,
                    x="classes that every client lacks",
                    y=_ACCURACY,
                    unit="share",
                )
            )
    return [chart for chart in charts if any(len(one.x) > 1 for one in chart.series)]


def _along(comparison: Comparison, levels: Sequence[Level], names: Sequence[str], column: str) -> tuple[Series, ...]:
    found = {(row.method, row.level): row.numbers[column] for row in comparison.rows}
    series = []
    for place, method in enumerate(comparison.section.methods):
        points = [(name, found[method, level]) for name, level in zip(names, levels, strict=True) if (method, level) in found]
        known = [(name, value.mean, value.deviation or 0.0) for name, value in points if value.mean is not None]
        if known:
            x, y, deviation = zip(*known, strict=True)
            series.append(Series(method=method, place=place, x=x, y=y, deviation=deviation))
    return tuple(series)
