"""Pictures of a comparison: curves, and scores of clients."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from sparsekit_fl.comparison import Comparison
from sparsekit_fl.errors import need
from sparsekit_fl.paper.published import protocol_difference, published_numbers
from sparsekit_fl.results import primary_metric
from sparsekit_fl.stored import scale

# Okabe and Ito's colours, which remain distinct to colour-blind readers.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_GREY, _INK = "#C8CCD0", "#333333"
_STYLE = {"font.family": "sans-serif", "font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "sparsekit"}
_AXES = (
    ("round", "round", "number"),
    ("flops", "FLOPs of all clients so far", "flops"),
    ("simulated_seconds", "simulated time so far", "seconds"),
    ("flops_paper", "FLOPs so far, counted as in the paper", "flops"),
)


def pictures_of(comparison: Comparison) -> dict[str, Any]:
    """Draw every picture that a comparison has the data for.

    Returns:
        Title → matplotlib Figure; `to_svg` writes one.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    with need("matplotlib").rc_context(_STYLE):
        return {**_curves(comparison), **_clients(comparison)}


def to_svg(figure: Any) -> bytes:
    """Return a figure as SVG; equal figures give equal bytes."""
    buffer = io.BytesIO()
    with need("matplotlib").rc_context(_STYLE):
        figure.savefig(buffer, format="svg", facecolor="white", metadata={"Date": None})
    return buffer.getvalue()


def _figure(title: str, count: int = 1, height: float = 3.9) -> tuple[Any, list[Any]]:
    """Return a figure, and its axes from left to right."""
    figure = need("matplotlib.figure").Figure(figsize=(6.4 if count == 1 else 3.9 * count, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    every = list(figure.subplots(1, count, squeeze=False)[0])
    for axes in every:
        axes.grid(visible=True, color="#E4E6E8", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, every


def _metric(comparison: Comparison) -> tuple[str, str]:
    """Return the metric that stands for all, and its unit."""
    name = primary_metric(
        dict.fromkeys(name for _, result in comparison.results for name in result["final"].get("personal", {}))
    )
    return name, "share" if name == "accuracy" else "number"


def _curves(comparison: Comparison) -> dict[str, Any]:
    """Draw means over the seeds, in the rounds in which all runs of a method were scored."""
    metric, unit = _metric(comparison)
    published = not protocol_difference(comparison)
    shown = _AXES if published else _AXES[:-1]
    names = [name for name, _, _ in shown]
    rows = [
        (trial.method, trial.seed, *({"round": record["round"], **record["cost"]}.get(name) for name in names),
         (record["evaluation"].get("personal") or {}).get(metric))
        for trial, result in comparison.results for record in result["rounds"] if record["evaluation"]
    ]  # fmt: skip
    frame = need("pandas").DataFrame(rows, columns=["series", "seed", *names, "y"]).dropna()
    groups = frame.assign(at=frame["round"]).groupby(["series", "at"])
    means = groups.agg(n=("seed", "nunique"), y=("y", "mean"), deviation=("y", "std"), **{one: (one, "mean") for one in names})
    means = means.fillna({"deviation": 0.0}).reset_index()
    means = means[means["n"] == means["series"].map(frame.groupby("series")["seed"].nunique())]
    means = means[means.groupby("series")["at"].transform("size") > 1]
    if means.empty:
        return {}
    title, series = f"{metric.capitalize()} on the clients' own test data", comparison.highlighted(means["series"])
    figure, every = _figure(title, len(shown))
    for axes, (name, text, x_unit) in zip(every, shown, strict=True):
        _lines(axes, means, name, series)
        if x_unit != "number" and (means[name] > 0).all():
            _log_scale(axes, means[name])
        axes.set(xlabel=text, ylabel=f"mean personal {metric}" if name == "round" else "")
        if unit == "share":
            # Spend the height on where series differ, not on the first rounds.
            clear = means[means["series"].isin(series)]
            low = clear.groupby("series")["y"].quantile(0.1, interpolation="lower").min()
            high = min(1.0, (clear["y"] + clear["deviation"]).max())
            room = max(0.01, 0.08 * (high - low))
            axes.set_ylim(max(0.0, low - room), high + room)
        _units(axes.xaxis, x_unit, means[name])
        _units(axes.yaxis, unit, means["y"])
    if published:
        for method, colour in zip(series, _COLOURS, strict=False):
            for _, _, accuracy, deviation, flops in published_numbers(method, comparison.dataset)[:1]:
                every[-1].errorbar([flops * 1e12], [accuracy / 100], [deviation / 100], color=colour, marker="D", markersize=8,
                                   linestyle="none", markerfacecolor="white", label="published")  # fmt: skip
    handles, labels = every[-1].get_legend_handles_labels()
    first = {label: labels.index(label) for label in labels}  # "others" and "published" are one entry each
    figure.legend([handles[at] for at in first.values()], first, frameon=False, loc="outside lower center",
                  ncols=min(len(first), 3 * len(every)))  # fmt: skip
    return {title: figure}


def _lines(axes: Any, means: Any, x: str, series: Sequence[str]) -> None:
    """Draw a line per method, those of `series` with a colour and a band of one deviation, above the others."""
    groups = dict(list(means.groupby("series")))
    for own in (own for name, own in groups.items() if name not in series):
        axes.plot(own[x], own["y"], color=_GREY, linewidth=1.0, label="others")
    for name, colour, marker in zip(series, _COLOURS, "os^Dvo", strict=False):
        at, y, deviation = groups[name][x], groups[name]["y"], groups[name]["deviation"]
        axes.plot(at, y, color=colour, marker=marker, markersize=4, markevery=max(1, len(at) // 8),
                  linewidth=2.4 if name == series[0] else 1.5, label=name)  # fmt: skip
        axes.fill_between(at, y - deviation, y + deviation, color=colour, alpha=0.15, linewidth=0)


def _log_scale(axes: Any, values: Any) -> None:
    axes.set_xscale("log")
    ticker, decades = need("matplotlib.ticker"), math.log10(values.max() / values.min())
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1,) if decades > 2 else (1, 3) if decades > 1 else (1, 2, 5)))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())


def _clients(comparison: Comparison) -> dict[str, Any]:
    """Draw how the clients of each method differ at the end; of all seeds together, the largest median above."""
    metric, unit = _metric(comparison)
    rows = [
        (trial.method, client["metrics"]["personal"].get(metric))
        for trial, result in comparison.results
        for client in result["final"].get("per_client", [])
    ]
    points = need("pandas").DataFrame(rows, columns=["series", "y"]).dropna()
    if points.empty:
        return {}
    groups = points.groupby("series")["y"]
    names, series = list(groups.median().sort_values().index), comparison.highlighted(points["series"])
    title = f"Final {metric} of each client"
    figure, (axes,) = _figure(title, height=1.2 + 0.27 * len(names))
    drawn = axes.boxplot([groups.get_group(name) for name in names], orientation="horizontal", patch_artist=True, widths=0.6,
                         flierprops={"markersize": 3}, medianprops={"color": _INK}, manage_ticks=False)  # fmt: skip
    for name, box in zip(names, drawn["boxes"], strict=True):
        box.set(facecolor=_COLOURS[series.index(name)] if name in series else _GREY, alpha=0.6)
    axes.set_yticks(range(1, len(names) + 1), names)
    axes.set_xlabel(f"personal {metric}; box: half of the clients")
    _units(axes.xaxis, unit, points["y"])
    return {title: figure}


def _units(axis: Any, unit: str, values: Any) -> None:
    """Write the ticks of an axis in its unit."""
    ticker = need("matplotlib.ticker")
    if unit == "number" and axis.axis_name == "x":
        axis.set_major_locator(ticker.MaxNLocator(integer=True))  # rounds are whole
    elif unit != "number":
        size, sign = scale(unit, values.max())
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{round(value / size, 4):g}{sign}"))
