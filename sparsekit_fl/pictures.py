"""The picture of a comparison: scores over rounds, FLOPs and simulated time."""

from __future__ import annotations

import io
from typing import Any

from sparsekit_fl.comparison import Comparison
from sparsekit_fl.errors import need
from sparsekit_fl.results import primary_metric
from sparsekit_fl.stored import scale

# Okabe and Ito's colours, which remain distinct to colour-blind readers; more methods get others.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_STYLE = {"font.family": "sans-serif", "font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "sparsekit"}
_AXES = (
    ("round", "round", "number"),
    ("flops", "FLOPs of all clients so far", "flops"),
    ("simulated_seconds", "simulated time so far", "seconds"),
)


def curves_of(comparison: Comparison) -> Any:
    """Draw the mean score of clients over the seeds, in the rounds in which all runs of a method were scored.

    Returns:
        A matplotlib Figure, which `to_svg` writes; None where no method was scored twice.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    matplotlib = need("matplotlib")
    metric, unit = _metric(comparison)
    means = _means(comparison, metric)
    if means.empty:
        return None
    with matplotlib.rc_context(_STYLE):
        figure = need("matplotlib.figure").Figure(figsize=(3.9 * len(_AXES), 3.9), layout="constrained")
        figure.suptitle(f"{metric.capitalize()} on the clients' own test data", x=0.01, ha="left", fontsize=11)
        for axes, (x, text, x_unit) in zip(figure.subplots(1, len(_AXES)), _AXES, strict=True):
            axes.grid(visible=True, color="#E4E6E8", linewidth=0.8)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_prop_cycle(color=[*_COLOURS, *matplotlib.colormaps["tab20"].colors])
            for name, own in means.groupby("series"):
                (line,) = axes.plot(own[x], own["y"], linewidth=1.6, label=name)
                low, high = own["y"] - own["deviation"], own["y"] + own["deviation"]
                axes.fill_between(own[x], low, high, color=line.get_color(), alpha=0.15, linewidth=0)
            axes.set(xlabel=text, ylabel=f"mean personal {metric}" if x == "round" else "")
            _units(axes.xaxis, x_unit, means[x])
            _units(axes.yaxis, unit, means["y"])
        figure.legend(*axes.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=7)
    return figure


def to_svg(figure: Any) -> bytes:
    """Return a figure as SVG; equal figures give equal bytes."""
    buffer = io.BytesIO()
    with need("matplotlib").rc_context(_STYLE):
        figure.savefig(buffer, format="svg", facecolor="white", metadata={"Date": None})
    return buffer.getvalue()


def _metric(comparison: Comparison) -> tuple[str, str]:
    """Return the metric that stands for all, and its unit."""
    name = primary_metric(dict.fromkeys(name for result in comparison.results for name in result["final"].get("personal", {})))
    return name, "share" if name == "accuracy" else "number"


def _means(comparison: Comparison, metric: str) -> Any:
    """Return means by method and round, as a DataFrame; methods that were scored once are left out."""
    names = [name for name, _, _ in _AXES]
    rows = [
        (result["method"], result["seed"], *({"round": record["round"], **record["cost"]}.get(name) for name in names),
         (record["evaluation"].get("personal") or {}).get(metric))
        for result in comparison.results for record in result["rounds"] if record["evaluation"]
    ]  # fmt: skip
    frame = need("pandas").DataFrame(rows, columns=["series", "seed", *names, "y"]).dropna()
    groups = frame.assign(at=frame["round"]).groupby(["series", "at"])
    means = groups.agg(n=("seed", "nunique"), y=("y", "mean"), deviation=("y", "std"), **{one: (one, "mean") for one in names})
    means = means.fillna({"deviation": 0.0}).reset_index()
    means = means[means["n"] == means["series"].map(frame.groupby("series")["seed"].nunique())]
    return means[means.groupby("series")["at"].transform("size") > 1]


def _units(axis: Any, unit: str, values: Any) -> None:
    """Write the ticks of an axis in its unit."""
    ticker = need("matplotlib.ticker")
    if unit == "number" and axis.axis_name == "x":
        axis.set_major_locator(ticker.MaxNLocator(integer=True))  # rounds are whole
    elif unit != "number":
        size, sign = scale(unit, values.max())
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{round(value / size, 4):g}{sign}"))
