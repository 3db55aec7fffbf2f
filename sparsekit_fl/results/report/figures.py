"""Figures of a comparison: a front, curves and bars at each level, and lines against levels of heterogeneity."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparsekit_fl.errors import need
from sparsekit_fl.results.report.comparison import TARGET, Comparison, slug
from sparsekit_fl.results.report.plots import Figure
from sparsekit_fl.results.report.trials import Level

_ACCURACY = "mean personal accuracy on test data"
# Metric of the x axis → the figure.
_CURVES: Mapping[str, Mapping[str, Any]] = {
    "flops": {
        "name": "accuracy-flops", "title": "Accuracy against FLOPs", "x_unit": "flops", "log": True,
        "x": "FLOPs of all clients so far (compact submodels)",
    },
    "simulated_seconds": {
        "name": "accuracy-time", "title": "Accuracy against simulated time", "x_unit": "seconds", "log": True,
        "x": "simulated seconds so far",
    },
    "round": {"name": "accuracy-rounds", "title": "Accuracy against rounds", "x": "round"},
}  # fmt: skip
# Column of the bars → column of the rings, and the figure.
_BARS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "personal_accuracy": ("global_accuracy", {
        "name": "bars-accuracy", "title": "Accuracy per method", "x_unit": "share",
        "x": "personal accuracy; ring: of the global model",
    }),
    "flops": ("flops_paper", {
        "name": "bars-flops", "title": "FLOPs per method", "x_unit": "flops",
        "x": "FLOPs; ring: training alone, counted as in the paper",
    }),
    TARGET: ("", {"name": "bars-time", "x": "seconds; no bar: never reached", "x_unit": "seconds"}),
}  # fmt: skip
# Column of the y axis → name of the file, title, text and unit of the axis.
_DEVICES = {
    "personal_accuracy": ("accuracy", "Accuracy", _ACCURACY, "share"),
    "simulated_seconds": ("time", "Simulated time", "simulated seconds of the run", "seconds"),
    TARGET: ("target-time", "Time to the target", "simulated seconds to the target", "seconds"),
}


def figures_of(comparison: Comparison) -> list[Figure]:
    """Make every figure that a comparison has the data for; those against levels come first."""
    found = level_figures(comparison)
    goal = next(column.title for column in comparison.columns if column.name == TARGET)
    for level in comparison.levels:
        own = [_front(comparison, level), *_curves(comparison, level)]
        for column, (ring, words) in _BARS.items():
            own.append(bars(comparison, level, column, ring, **{"title": f"Simulated {goal} accuracy", **words}))
        text = comparison.level_text(level)
        if text:
            own = [one and replace(one, name=f"{one.name}-{slug(text)}", title=f"{one.title} ({text})") for one in own]
        found += filter(None, own)
    return found


def points_of(points: Iterable[Sequence[object]]) -> Any:
    """Return the DataFrame of a figure from (series, x, y, deviation); a deviation that is not known is 0."""
    return need("pandas").DataFrame(list(points), columns=["series", "x", "y", "deviation"]).fillna({"deviation": 0.0})


def _figure(comparison: Comparison, points: Any, **words: Any) -> Figure:
    labels = {row.method: f"{row.method} ({row.runs})" for row in comparison.rows if row.n < row.of}
    # Highlighted ones come first, so that their colours differ most.
    first = set(comparison.highlighted())
    series = tuple(sorted(comparison.methods, key=lambda method: method not in first))
    return Figure(points=points, series=series, subject=comparison.subject, labels=labels, **words)


def curve(comparison: Comparison, level: Level, x: str, y: str, /, **words: Any) -> Figure | None:
    """Draw two columns of `Comparison.rounds` as means over the seeds, in the rounds in which all of a method were scored.

    Returns:
        None where no method was scored in more than one round.
    """
    rounds = comparison.rounds
    rounds = rounds[rounds["level"] == comparison.levels.index(level)]
    if not {x, y} <= set(rounds):
        return None
    groups = rounds.assign(x=rounds[x]).dropna(subset=[x, y]).groupby(["method", "round"], sort=False)
    points = groups.agg(x=("x", "mean"), y=(y, "mean"), deviation=(y, "std"), n=("seed", "nunique")).reset_index()
    seeds = rounds.groupby("method")["seed"].nunique()
    points = points[points["n"] == points["method"].map(seeds)].sort_values("round", kind="stable")
    points = points_of(points[["method", "x", "y", "deviation"]].to_numpy().tolist())
    points = points[points.groupby("series")["x"].transform("size") > 1]
    return _figure(comparison, points, plot="lines", **{"y": _ACCURACY, **words}) if len(points) else None


def _curves(comparison: Comparison, level: Level) -> list[Figure | None]:
    """Make the curves of accuracy, then those against rounds of all else that clients were scored by."""
    found = [curve(comparison, level, x, "personal_accuracy", **words) for x, words in _CURVES.items()]
    metrics = dict.fromkeys(name for _, result in comparison.results for name in result["final"]["personal"])
    wanted = [("accuracy", "global", ""), ("accuracy", "personal", "_worst_decile")]
    wanted += [(name, "personal", kind) for name in metrics if name != "accuracy" for kind in ("", "_worst_decile")]
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


def _front(comparison: Comparison, level: Level) -> Figure | None:
    points = points_of(
        (row.method, row.mean["flops"], row.mean["personal_accuracy"], row.deviation["personal_accuracy"])
        for row in comparison.rows
        if row.level == level and row.mean["flops"] > 0
    ).dropna()
    if len(points) < 2:
        return None
    return _figure(
        comparison, points, plot="front", name="front", title="Pareto chart: final accuracy against FLOPs", log=True,
        x="FLOPs; dotted: no method is better in both", x_unit="flops", y=_ACCURACY,
    )  # fmt: skip


def bars(comparison: Comparison, level: Level, column: str, ring: str = "", **words: Any) -> Figure | None:
    """Draw a column of the table, the best above and those without a number last, with another column as rings.

    Returns:
        None where no method has the number.
    """
    rows = [row for row in comparison.rows if row.level == level]
    points = points_of((row.method, 0.0, row.mean[column], row.deviation[column]) for row in rows)
    if points["y"].isna().all():
        return None
    points = points.sort_values("y", ascending=words.get("x_unit") != "share", na_position="last", kind="stable")
    marks = points_of((row.method, 0.0, row.mean[ring], 0.0) for row in rows) if ring else None
    return _figure(comparison, points, plot="bars", marks=marks, **words)


def level_figures(comparison: Comparison) -> list[Figure]:
    """Make the figures against each axis of heterogeneity with several values, one for every value of the other."""
    devices = list(dict.fromkeys(name for name, _ in comparison.levels))
    lacks = sorted({lack for _, lack in comparison.levels})
    named, numbers = [name for name in devices if name], [lack for lack in lacks if lack >= 0]
    found = []
    for lack in lacks if len(named) > 1 else ():
        several = lack >= 0 and len(lacks) > 1
        end, about = (f"-lacks-{lack}", f", clients lack {lack} classes") if several else ("", "")
        for column, (name, title, y, unit) in _DEVICES.items():
            found.append(
                _along(comparison, {name: (name, lack) for name in named}, column, name=f"{name}-heterogeneity{end}",
                       title=f"{title} against system heterogeneity{about}", x="heterogeneity of the devices", y=y, y_unit=unit)
            )  # fmt: skip
    for device in devices if len(numbers) > 1 else ():
        end, about = (f"-{device}", f", heterogeneity {device}") if len(devices) > 1 else ("", "")
        found.append(
            _along(comparison, {str(lack): (device, lack) for lack in numbers}, "personal_accuracy",
                   name=f"accuracy-classes{end}", title=f"Accuracy against non-IID level{about}",
                   x="classes that every client lacks", y=_ACCURACY)
        )  # fmt: skip
    return [one for one in found if (one.points.groupby("series").size() > 1).any()]


def _along(comparison: Comparison, along: Mapping[str, Level], column: str, **words: Any) -> Figure:
    points = points_of(
        (row.method, name, row.mean[column], row.deviation[column])
        for name, level in along.items()
        for row in comparison.rows
        if row.level == level
    )
    return _figure(comparison, points.dropna(subset=["y"]), plot="lines", x_unit="name", **words)
