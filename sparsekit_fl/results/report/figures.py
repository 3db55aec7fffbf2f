"""Figures of a comparison: a front, curves and bars at each level, and lines against levels of heterogeneity."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from sparsekit_fl.results.extra import need
from sparsekit_fl.results.report.comparison import TARGET, Comparison
from sparsekit_fl.results.report.frame import curve_points
from sparsekit_fl.results.report.plots import Figure

POINTS = ["series", "x", "y", "deviation"]
_ACCURACY = "mean personal accuracy on test data"
# Name of the file, title, metrics of both axes, text and unit of x.
_CURVES = (
    ("accuracy-flops", "Accuracy against FLOPs", "flops_compact", "FLOPs of all clients so far (compact submodels)", "flops"),
    ("accuracy-time", "Accuracy against simulated time", "simulated_seconds", "simulated seconds so far", "seconds"),
    ("accuracy-rounds", "Accuracy against rounds", "round", "round", "number"),
)
# Name of the file, title, column, column of the ring, text of the axis, unit.
_BARS = (
    ("bars-accuracy", "Accuracy per method", "personal_accuracy", "global_accuracy",
     "personal accuracy; ring: of the global model", "share"),
    ("bars-flops", "FLOPs per method", "flops_compact", "flops_rowmask",
     "FLOPs, compact; ring: training alone, by the row-mask convention", "flops"),
    ("bars-time", "Simulated time to the target", TARGET, "", "seconds; no bar: never reached", "seconds"),
)  # fmt: skip
# Column, name of the file, title, text and unit of y.
_DEVICES = (
    ("personal_accuracy", "accuracy", "Accuracy", _ACCURACY, "share"),
    ("simulated_seconds", "time", "Simulated time", "simulated seconds of the run", "seconds"),
    (TARGET, "target-time", "Time to the target", "simulated seconds to the target", "seconds"),
)


def figures_of(comparison: Comparison) -> list[Figure]:
    """Make every figure that a comparison has the data for; those against levels come first.

    Args:
        comparison: Rows of the figures.
    """
    found = level_figures(comparison)
    for level in comparison.levels:
        own = [_front(comparison, level), *_curves(comparison, level)]
        for name, title, column, ring, x, unit in _BARS:
            titled = next(one.title for one in comparison.columns if one.name == column)
            title = f"Simulated {titled} accuracy" if column == TARGET else title
            own.append(bars(comparison, level, column, ring, name=name, title=title, x=x, x_unit=unit))
        text = comparison.level_text(*level)
        if text:
            slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
            own = [one and replace(one, name=f"{one.name}-{slug}", title=f"{one.title} ({text})") for one in own]
        found += filter(None, own)
    return found


def _ordered(comparison: Comparison) -> tuple[str, ...]:
    """Return methods in the order of their colours: highlighted ones first, so that theirs differ most."""
    first = set(comparison.highlighted())
    return tuple(sorted(comparison.methods, key=lambda method: method not in first))


def _figure(comparison: Comparison, points: Any, **words: Any) -> Figure:
    labels = tuple((row.method, f"{row.method} ({row.runs})") for row in comparison.rows if row.n < row.of)
    return Figure(points=points, series=_ordered(comparison), subject=comparison.subject, labels=labels, **words)


def _frame(points: Iterable[Sequence[object]]) -> Any:
    return need("pandas").DataFrame(list(points), columns=POINTS).fillna({"deviation": 0.0})


def curve(comparison: Comparison, level: tuple[str, int], x_metric: str, y_metric: str, **words: Any) -> Figure | None:
    """Make a figure of lines, of the methods that were scored more than once; None where there is none.

    Args:
        comparison: Ours.
        level: Heterogeneity and number of lacking classes.
        x_metric: Metric of the x axis, or "round".
        y_metric: Metric of the y axis.
        words: Further fields of the figure.
    """
    frame = comparison.frame
    here = frame[(frame["heterogeneity"] == level[0]) & (frame["lack_classes"] == level[1])]
    points = curve_points(here, x_metric, y_metric)
    points = points[points.groupby("series")["x"].transform("size") > 1] if len(points) else points
    return _figure(comparison, points, plot="lines", **words) if len(points) else None


def _curves(comparison: Comparison, level: tuple[str, int]) -> list[Figure | None]:
    """Make the curves of accuracy, then those against rounds of all else that clients were scored by."""
    found = [
        curve(comparison, level, metric, "personal_accuracy", name=name, title=title, x=x, x_unit=unit, y=_ACCURACY,
              log=metric != "round")
        for name, title, metric, x, unit in _CURVES
    ]  # fmt: skip
    metrics = dict.fromkeys(name for trial in comparison.finished for name in (trial.result or {})["final"]["personal"])
    wanted = [("accuracy", "global", ""), ("accuracy", "personal", "_worst")]
    wanted += [(name, "personal", kind) for name in metrics if name != "accuracy" for kind in ("", "_worst")]
    for metric, part, kind in wanted:
        which = "mean of the worst tenth," if kind else "mean"
        found.append(
            curve(
                comparison, level, "round", f"{part}_{metric}{kind}",
                name="-".join(filter(None, (re.sub(r"\W+", "-", metric), part.replace("personal", ""), kind[1:], "rounds"))),
                title=f"{metric.replace('_', ' ').capitalize()} of the {part} model"
                f"{', worst tenth of the clients' if kind else ''}, against rounds",
                x="round", y=f"{which} {part} {metric} on test data", y_unit="share" if metric == "accuracy" else "number",
            )
        )  # fmt: skip
    return found


def _front(comparison: Comparison, level: tuple[str, int]) -> Figure | None:
    points = _frame(
        (row.method, row.mean["flops_compact"], row.mean["personal_accuracy"], row.deviation["personal_accuracy"])
        for row in comparison.rows
        if (row.heterogeneity, row.lack_classes) == level and row.mean["flops_compact"] > 0
    ).dropna()
    if len(points) < 2:
        return None
    return _figure(
        comparison, points, plot="front", name="front", title="Pareto chart: final accuracy against FLOPs", log=True,
        x="FLOPs, compact; dotted: no method is better in both", x_unit="flops", y=_ACCURACY,
    )  # fmt: skip


def bars(comparison: Comparison, level: tuple[str, int], column: str, ring: str = "", **words: Any) -> Figure | None:
    """Make a figure of bars, the best above and those without a number last; None where no method has the number.

    Args:
        comparison: Ours.
        level: Heterogeneity and number of lacking classes.
        column: Column of the table.
        ring: Column of the rings; empty for none.
        words: Further fields of the figure.
    """
    rows = [row for row in comparison.rows if (row.heterogeneity, row.lack_classes) == level]
    points = _frame((row.method, 0.0, row.mean[column], row.deviation[column]) for row in rows)
    if points["y"].isna().all():
        return None
    points = points.sort_values("y", ascending=words.get("x_unit") != "share", na_position="last", kind="stable")
    marks = _frame((row.method, 0.0, row.mean[ring], 0.0) for row in rows) if ring else None
    return _figure(comparison, points, plot="bars", marks=marks, **words)


def level_figures(comparison: Comparison) -> list[Figure]:
    """Make the figures against each axis of heterogeneity with several values, one for every value of the other.

    Args:
        comparison: Rows of the figures.
    """
    devices = list(dict.fromkeys(name for name, _ in comparison.levels))
    lacks = sorted({lack for _, lack in comparison.levels})
    named, numbers = [name for name in devices if name], [lack for lack in lacks if lack >= 0]
    found = []
    for lack in lacks if len(named) > 1 else ():
        several = lack >= 0 and len(lacks) > 1
        end, about = (f"-lacks-{lack}", f", clients lack {lack} classes") if several else ("", "")
        along = {name: (name, lack) for name in named}
        for column, name, title, y, unit in _DEVICES:
            found.append(
                _along(comparison, along, column, name=f"{name}-heterogeneity{end}",
                       title=f"{title} against system heterogeneity{about}", x="heterogeneity of the devices", y=y, y_unit=unit)
            )  # fmt: skip
    for device in devices if len(numbers) > 1 else ():
        end, about = (f"-{device}", f", heterogeneity {device}") if len(devices) > 1 else ("", "")
        along = {str(lack): (device, lack) for lack in numbers}
        found.append(
            _along(comparison, along, "personal_accuracy", name=f"accuracy-classes{end}",
                   title=f"Accuracy against non-IID level{about}", x="classes that every client lacks", y=_ACCURACY)
        )  # fmt: skip
    return [one for one in found if (one.points.groupby("series").size() > 1).any()]


def _along(comparison: Comparison, along: dict[str, tuple[str, int]], column: str, **words: Any) -> Figure:
    rows = {(row.heterogeneity, row.lack_classes, row.method): row for row in comparison.rows}
    points = _frame(
        (method, name, row.mean[column], row.deviation[column])
        for name, level in along.items()
        for method in comparison.methods
        if (row := rows.get((*level, method))) is not None
    )
    return _figure(comparison, points.dropna(subset=["y"]), plot="levels", x_unit="name", **words)
