"""Pictures of a comparison: curves, scores of clients, levels of heterogeneity, options of methods, and executed ratios."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from sparsekit_fl.comparison import Comparison
from sparsekit_fl.errors import need
from sparsekit_fl.paper.published import PUBLISHED_LEVEL, protocol_difference, published_numbers
from sparsekit_fl.stored import scale
from sparsekit_fl.trials import Level, Trial

# Okabe and Ito's colours, which remain distinct to colour-blind readers.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_GREY, _INK = "#C8CCD0", "#333333"
_STYLE = {"font.family": "sans-serif", "font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "sparsekit"}
_WINDOWS = 10
_OPTION = re.compile(r"([\w-]+)\[(\w+)=([\d.e-]+)\]")


@dataclass(frozen=True, kw_only=True, eq=False)
class Panel:
    """One pair of axes.

    Args:
        points: DataFrame with the columns series, x, y and deviation. Of boxes: all values of a series in y.
        x: Text of the x axis.
        y: Text of the y axis.
        x_unit: Unit of x: "share", "flops", "seconds", "number", or "name" for levels in words.
        y_unit: Unit of y.
        log: Whether the x axis is logarithmic.
        boxes: Draw a box per series instead of lines.
        marks: DataFrame like `points` of published numbers, drawn as diamonds.
    """

    points: Any
    x: str
    y: str
    x_unit: str = "number"
    y_unit: str = "share"
    log: bool = False
    boxes: bool = False
    marks: Any = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    """Panels next to each other, with one legend.

    Args:
        title: Text above it.
        panels: From left to right.
        series: Names that have a colour, in the order of the legend; others are grey.
    """

    title: str
    panels: Sequence[Panel]
    series: Sequence[str]


def pictures_of(comparison: Comparison) -> list[Picture]:
    """Make every picture that a comparison has the data for."""
    found: list[Picture | None] = [*_levels(comparison), *_options(comparison)]
    for level in comparison.levels:
        text = comparison.level_text(level)
        found += [make(comparison, level, f" ({text})" if text else "") for make in (_curves, _clients, _ratios)]
    return [one for one in found if one is not None]


def _points(rows: Iterable[tuple[Any, ...]]) -> Any:
    frame = need("pandas").DataFrame(list(rows), columns=["series", "x", "y", "deviation"])
    return frame.fillna({"deviation": 0.0}).dropna(subset=["y"])


def _metric(comparison: Comparison) -> tuple[str, str]:
    """Return the metric that stands for all, and its unit."""
    names = list(dict.fromkeys(name for _, result in comparison.results for name in result["final"].get("personal", {})))
    others = [name for name in names if name != "loss"]
    name = "accuracy" if "accuracy" in names else (others or ["loss"])[0]
    return name, "share" if name == "accuracy" else "number"


def _at(comparison: Comparison, level: Level) -> list[tuple[Trial, Mapping[str, Any]]]:
    return [(trial, result) for trial, result in comparison.results if trial.level == level]


_AXES = (
    ("round", "round", "number"),
    ("flops", "FLOPs of all clients so far", "flops"),
    ("simulated_seconds", "simulated time so far", "seconds"),
    ("flops_paper", "FLOPs so far, counted as in the paper", "flops"),
)


def _curves(comparison: Comparison, level: Level, end: str) -> Picture | None:
    """Draw means over the seeds, in the rounds in which all runs of a method were scored."""
    metric, unit = _metric(comparison)
    published = level == PUBLISHED_LEVEL and not protocol_difference(comparison)
    names = [name for name, _, _ in _AXES]
    rows = [
        (trial.method, trial.seed, *({"round": record["round"], **record["cost"]}.get(name) for name in names),
         (record["evaluation"].get("personal") or {}).get(metric))
        for trial, result in _at(comparison, level) for record in result["rounds"] if record["evaluation"]
    ]  # fmt: skip
    frame = need("pandas").DataFrame(rows, columns=["series", "seed", *names, "y"]).dropna()
    groups = frame.assign(at=frame["round"]).groupby(["series", "at"])
    means = groups.agg(n=("seed", "nunique"), y=("y", "mean"), deviation=("y", "std"), **{one: (one, "mean") for one in names})
    means = means.fillna({"deviation": 0.0}).reset_index()
    means = means[means["n"] == means["series"].map(frame.groupby("series")["seed"].nunique())]
    means = means[means.groupby("series")["at"].transform("size") > 1]
    if means.empty:
        return None
    panels = [
        Panel(points=means.assign(x=means[name]), x=text, y=f"mean personal {metric}" if name == "round" else "", x_unit=x_unit,
              y_unit=unit, log=x_unit != "number", marks=_published(comparison) if name == "flops_paper" else None)
        for name, text, x_unit in (_AXES if published else _AXES[:-1])
    ]  # fmt: skip
    title = f"{metric.capitalize()} on the clients' own test data{end}"
    return Picture(title=title, panels=panels, series=comparison.highlighted(means["series"]))


def _published(comparison: Comparison) -> Any:
    return _points(
        (method, flops * 1e12, accuracy / 100, deviation / 100)
        for method in comparison.methods
        for _, _, accuracy, deviation, flops in published_numbers(method, comparison.dataset)[:1]
    )


def _clients(comparison: Comparison, level: Level, end: str) -> Picture | None:
    """Draw how the clients of each method differ at the end; of all seeds together."""
    metric, unit = _metric(comparison)
    points = _points(
        (trial.method, trial.method, client["metrics"]["personal"].get(metric), 0.0)
        for trial, result in _at(comparison, level)
        for client in result["final"].get("per_client", [])
    )
    if points.empty:
        return None
    panel = Panel(points=points, x=f"personal {metric}; box: half of the clients", y="", x_unit=unit, y_unit="name", boxes=True)
    return Picture(title=f"Final {metric} of each client{end}", panels=[panel], series=comparison.highlighted(points["series"]))


def _over(comparison: Comparison, rows: Sequence[tuple[str, Any, Any]], x: str, x_unit: str, title: str) -> Picture | None:
    """Draw accuracy and simulated time of rows of the table over levels or options: series, x, row."""
    ys = (("personal_accuracy", "mean personal accuracy", "share"), ("simulated_seconds", "simulated time", "seconds"))
    frames = [_points((series, at, row.mean[name], row.deviation[name]) for series, at, row in rows) for name, _, _ in ys]
    frames = [frame[frame.groupby("series")["x"].transform("nunique") > 1] for frame in frames]
    panels = [
        Panel(points=frame, x=x, y=y, x_unit=x_unit, y_unit=unit)
        for frame, (_, y, unit) in zip(frames, ys, strict=True)
        if len(frame)
    ]
    series = comparison.highlighted(frames[0]["series"]) or list(dict.fromkeys(series for series, _, _ in rows))
    return Picture(title=title, panels=panels, series=series) if panels else None


def _levels(comparison: Comparison) -> Iterator[Picture | None]:
    """Draw against each axis of heterogeneity with several values, one picture for every value of the other."""
    for axis, x in ((0, "heterogeneity of the devices"), (1, "classes that every client lacks")):
        others = dict.fromkeys(level[1 - axis] for level in comparison.levels)
        for other in others:
            rows = [(row.method, str(row.level[axis]), row) for row in comparison.rows if row.level[1 - axis] == other]
            rows = [row for row in rows if row[1] not in ("", "-1")]
            end = "" if len(others) == 1 else f" ({'lacks' if axis == 0 else 'heterogeneity'} {other})"
            yield _over(comparison, rows, x, "name", f"Accuracy and time against {x}{end}")


def _options(comparison: Comparison) -> Iterator[Picture | None]:
    """Draw against a number that is an option of methods, as in `flst[ratio=0.2]`."""
    found: dict[str, list[tuple[str, Any, Any]]] = {}
    for row in comparison.rows if len(comparison.levels) == 1 else ():
        match = _OPTION.fullmatch(row.method)
        if match is not None:
            found.setdefault(match[2], []).append((match[1], float(match[3]), row))
    for option, rows in found.items():
        rows = sorted(rows, key=lambda row: row[1])
        yield _over(comparison, rows, option.replace("_", " "), "value", f"Accuracy and time against {option}")


def _ratios(comparison: Comparison, level: Level, end: str) -> Picture | None:
    """Draw the mean ratio that clients executed, by capability; a point is the mean over a tenth of the run."""
    executed = [
        (trial.method, f"devices of {Fraction(record['capabilities'][client]).limit_denominator(1000)}", record["round"], ratio)
        for trial, result in _at(comparison, level)
        for record in result["rounds"]
        for client, ratio in record.get("ratios", {}).items()
        if client in record.get("capabilities", {})
    ]
    frame = need("pandas").DataFrame(executed, columns=["method", "series", "round", "ratio"])
    varied = frame.groupby(["method", "series"])["ratio"].nunique().groupby("method").max()
    method = next((name for name in comparison.highlighted() if varied.get(name, 1) > 1), None)
    if method is None:
        return None
    own = frame[frame["method"] == method]
    last = int(own["round"].max())
    size = max(1, last // _WINDOWS)
    own = own.assign(x=(-(-own["round"] // size) * size).clip(upper=last))
    means = own.groupby(["series", "x"])["ratio"].agg(["mean", "std"]).reset_index()
    points = _points(means.itertuples(index=False))
    series = sorted(set(points["series"]), key=lambda name: -Fraction(name.rpartition(" ")[2]))
    panel = Panel(points=points, x="round", y="mean ratio that clients executed")
    return Picture(title=f"Ratios of {method}{end}, by capability", panels=[panel], series=series)


def draw(picture: Picture, file: Any) -> None:
    """Draw a picture into a file or a path; equal pictures give equal bytes.

    Args:
        picture: The picture.
        file: A path, whose ending decides the format, or an open file, for SVG.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    count = len(picture.panels)
    boxes = any(panel.boxes for panel in picture.panels)
    lines = picture.panels[0].points["series"].nunique()
    height = 1.2 + 0.27 * lines if boxes else 3.9
    with need("matplotlib").rc_context(_STYLE):
        figure = need("matplotlib.figure").Figure(figsize=(6.4 if count == 1 else 3.9 * count, height), layout="constrained")
        figure.suptitle(picture.title, x=0.01, ha="left", fontsize=11)
        every = figure.subplots(1, count, squeeze=False)[0]
        for axes, panel in zip(every, picture.panels, strict=True):
            axes.grid(visible=True, color="#E4E6E8", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_xlabel(panel.x)
            axes.set_ylabel(panel.y)
            (_boxes if panel.boxes else _lines)(axes, panel, picture.series)
            _units(axes.xaxis, panel.x_unit, panel.points["x" if not panel.boxes else "y"])
            _units(axes.yaxis, panel.y_unit, panel.points["y"])
        handles, labels = every[-1].get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=min(len(labels), 3 * count))
        suffix = {} if isinstance(file, str) or hasattr(file, "suffix") else {"format": "svg"}
        figure.savefig(file, dpi=150, facecolor="white", metadata={"Date": None} if suffix else None, **suffix)


def _lines(axes: Any, panel: Panel, series: Sequence[str]) -> None:
    """Draw a line per series, with a band of one deviation."""
    points = panel.points
    if panel.x_unit == "name":
        axes.xaxis.update_units(list(dict.fromkeys(points["x"])))
    grey = [name for name in dict.fromkeys(points["series"]) if name not in series]
    for name in [*grey, *(name for name in series if name in set(points["series"]))]:
        x, y, deviation = (points.loc[points["series"] == name, column].to_numpy() for column in ("x", "y", "deviation"))
        if name in grey:
            axes.plot(x, y, color=_GREY, linewidth=1.0, label="others" if name == grey[-1] else None)
            continue
        at = list(series).index(name)
        colour = _COLOURS[at % len(_COLOURS)]
        axes.plot(x, y, color=colour, marker="os^Dv"[at % 5], markersize=4, markevery=max(1, len(x) // 8),
                  linewidth=2.4 if at == 0 else 1.5, label=name)  # fmt: skip
        axes.fill_between(x, y - deviation, y + deviation, color=colour, alpha=0.15, linewidth=0)
    shown = () if panel.marks is None else panel.marks[panel.marks["series"].isin(series)].itertuples()
    for number, one in enumerate(shown):
        colour = _COLOURS[list(series).index(one.series) % len(_COLOURS)]
        axes.errorbar([one.x], [one.y], [one.deviation], color=colour, marker="D", markersize=8, linestyle="none",
                      markerfacecolor="white", label="published" if number == 0 else None)  # fmt: skip
    if panel.log and (points["x"] > 0).all():
        axes.set_xscale("log")
        ticker = need("matplotlib.ticker")
        decades = math.log10(points["x"].max() / points["x"].min())
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1,) if decades > 2 else (1, 3) if decades > 1 else (1, 2, 5)))
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    if panel.y_unit == "share":
        # Spend the height on where series differ, not on the first rounds.
        clear = points[points["series"].isin(series)] if panel.log or panel.x_unit == "number" else points
        low = clear.groupby("series")["y"].quantile(0.1, interpolation="lower").min()
        high = min(1.0, (clear["y"] + clear["deviation"]).max())
        room = max(0.01, 0.08 * (high - low))
        axes.set_ylim(max(0.0, low - room), high + room)


def _boxes(axes: Any, panel: Panel, series: Sequence[str]) -> None:
    """Draw a box per series, the largest median above."""
    groups = panel.points.groupby("series")["y"]
    names = list(groups.median().sort_values().index)
    drawn = axes.boxplot([groups.get_group(name) for name in names], orientation="horizontal", patch_artist=True, widths=0.6,
                         flierprops={"markersize": 3}, medianprops={"color": _INK}, manage_ticks=False)  # fmt: skip
    for name, box in zip(names, drawn["boxes"], strict=True):
        at = list(series).index(name) if name in series else None
        box.set(facecolor=_GREY if at is None else _COLOURS[at % len(_COLOURS)], alpha=0.6)
    axes.set_yticks(range(1, len(names) + 1), names)


def _units(axis: Any, unit: str, values: Any) -> None:
    """Write the ticks of an axis in its unit."""
    ticker = need("matplotlib.ticker")
    if unit == "number" and axis.axis_name == "x":
        axis.set_major_locator(ticker.MaxNLocator(integer=True))  # rounds are whole
    if unit in ("share", "flops", "seconds"):
        size, sign = scale(unit, values.max())
        sign = sign if unit != "share" else "%"
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{round(value / size, 4):g}{sign}"))
