"""The report of finished runs: one HTML page with tables and pictures, and published numbers where runs have their protocol."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from sparsekit.errors import require
from sparsekit_fl.checkpoint import write_atomically
from sparsekit_fl.comparison import Comparison
from sparsekit_fl.paper.published import published_beside, published_source
from sparsekit_fl.results import primary_metric
from sparsekit_fl.stored import flat, scale

PAGE = "report.html"

# Okabe and Ito's colors, which remain distinct to color-blind readers; more methods get others.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_STYLE = {"font.family": "sans-serif", "font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "sparsekit"}
_AXES = (
    ("round", "round", "number"),
    ("flops", "FLOPs of all clients so far", "flops"),
    ("simulated_seconds", "simulated time so far", "seconds"),
)


def write_report(comparisons: Sequence[Comparison], out: Path | str) -> Path:
    """Write `report.html` into a folder, a section for each comparison; return the file.

    Raises:
        MissingDependencyError: Jinja2 or matplotlib is not installed.
    """
    sections = []
    for comparison in comparisons:
        figure, published = curves_of(comparison), published_beside(comparison)
        sections.append(
            {
                "comparison": comparison,
                "about": _about(comparison),
                "tables": [_html(comparison.table(part)) for part in ("final", "cost")],
                "picture": "" if figure is None else base64.b64encode(to_svg(figure)).decode(),
                "published": None if published is None else _html(published_table(published)),
            }
        )
    source = published_source() if any(one["published"] for one in sections) else ""
    title = comparisons[0].title if len(comparisons) == 1 else "Comparison of methods"
    environment = require("jinja2").Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8"))
    path = Path(out) / PAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another `compare` may write the page of its own trials at the same time.
    write_atomically(path, template.render(title=title, sections=sections, source=source).encode())
    return path


def published_table(published: Any) -> Any:
    """Return the DataFrame of `paper.published_beside` as text: a row per run, `*` where it differs by more than chance."""
    rows = []
    for run, own in published.groupby(["table", "run"], sort=False):
        row = {"run": run[1], "published as": own["method"].iloc[0]}
        for one in own.itertuples():
            title, digits = ("%", 2) if one.quantity == "accuracy_percent" else ("10¹² FLOPs", 3)
            for whose, value, deviation in (("published", one.published, one.published_deviation), ("ours", one.ours, None)):
                text = f"{value:,.{digits}f}" + (f" ± {deviation:.{digits}f}" if deviation is not None else "")
                row[f"{whose}, {title}"] = text + ("*" if whose == "ours" and one.flagged else "")
        row["why they differ"] = " ".join(dict.fromkeys(filter(None, own["reason"])))
        rows.append(row)
    return require("pandas").DataFrame(rows).set_index("run")


def _html(frame: Any) -> str:
    """Return a DataFrame of text as a table."""
    return str(frame.rename_axis(None).to_html(border=0))


def _about(comparison: Comparison) -> str:
    """Return the settings of the runs, and version and date, in one line."""
    settings = {name.rpartition(".")[2]: value for name, value in flat(comparison.config).items() if value is not None}
    parts = [f"{name.replace('_', ' ')} {value}" for name, value in settings.items() if name != "seed"]
    known = [result.get("environment") or {} for result in comparison.results]
    versions = {f"sparsekit {one['sparsekit']}" for one in known if "sparsekit" in one}
    dates = sorted({str(one["finished"])[:10] for one in known if "finished" in one})
    return "; ".join([*parts, *sorted(versions), *([" to ".join(dict.fromkeys([dates[0], dates[-1]]))] if dates else [])])


def curves_of(comparison: Comparison) -> Any:
    """Draw the mean score of clients over the seeds, in the rounds in which all runs of a method were scored.

    Returns:
        A matplotlib Figure, which `to_svg` writes; None where no method was scored twice.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    matplotlib = require("matplotlib")
    metric, unit = _metric(comparison)
    means = _means(comparison, metric)
    if means.empty:
        return None
    with matplotlib.rc_context(_STYLE):
        figure = require("matplotlib.figure").Figure(figsize=(3.9 * len(_AXES), 3.9), layout="constrained")
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
    with require("matplotlib").rc_context(_STYLE):
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
    frame = require("pandas").DataFrame(rows, columns=["series", "seed", *names, "y"]).dropna()
    groups = frame.assign(at=frame["round"]).groupby(["series", "at"])
    means = groups.agg(n=("seed", "nunique"), y=("y", "mean"), deviation=("y", "std"), **{one: (one, "mean") for one in names})
    means = means.fillna({"deviation": 0.0}).reset_index()
    means = means[means["n"] == means["series"].map(frame.groupby("series")["seed"].nunique())]
    return means[means.groupby("series")["at"].transform("size") > 1]


def _units(axis: Any, unit: str, values: Any) -> None:
    """Write the ticks of an axis in its unit."""
    ticker = require("matplotlib.ticker")
    if unit == "number" and axis.axis_name == "x":
        axis.set_major_locator(ticker.MaxNLocator(integer=True))  # rounds are whole
    elif unit != "number":
        size, sign = scale(unit, values.max())
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{round(value / size, 4):g}{sign}"))
