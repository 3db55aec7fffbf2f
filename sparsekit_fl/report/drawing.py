"""How charts are drawn: as files with a legend, and as SVG for a page, whose legend, colours of paper and ink are the page's.

Equal charts give equal bytes.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from sparsekit_fl.report.chart import Chart, Mark, Series, Unit, on_front
from sparsekit_fl.report.table import flops_text
from sparsekit_fl.results.extra import need

__all__ = ["draw_chart", "draw_side_by_side", "inline_svg", "series_style"]

# Okabe and Ito's colours, which remain distinct to colour-blind readers, and two more that show on light and dark alike.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D4F", "#808080")
_DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.2, 1.6), (6, 2, 1.2, 2))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_INK, _FAINT, _GREY = "#333333", "#DDDDDD", "#A0A8B0"
_MOST_BANDS = 8
_BAR_INCHES = 0.27


def series_style(place: int) -> tuple[str, tuple[float, ...], str]:
    """Return colour, dashes and marker of the method at a place; distinct for 32 of them."""
    turn = place // len(_COLOURS)
    return _COLOURS[place % len(_COLOURS)], _DASHES[turn % len(_DASHES)], _MARKERS[(place + turn) % len(_MARKERS)]


def draw_chart(chart: Chart, *paths: Path | str) -> None:
    """Draw a chart with its title and legend into files, whose endings decide the format.

    Args:
        chart: The chart.
        paths: Files of the pictures.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    named = [*filter(_stands_out, chart.series)]
    few = len(named) <= 6
    width = 6.4 if chart.kind == "bar" or few else 8.6
    # A legend at the side needs a line per method.
    figure, axes = _figure(chart, width, 4.3 if few else max(4.3, 0.6 + 0.195 * len(named)))
    with _style():
        axes.set_title(chart.title, fontsize=12, loc="left")
        if chart.kind != "bar":
            where = {"loc": "outside lower center", "ncols": 3} if few else {"loc": "outside right upper"}
            handles, labels = axes.get_legend_handles_labels()
            if handles:
                figure.legend(handles, labels, frameon=False, fontsize=9, handlelength=3.2, **where)
        for path in paths:
            metadata = {"Date": None} if str(path).endswith(".svg") else None
            figure.savefig(path, dpi=150, facecolor="white", metadata=metadata)


def draw_side_by_side(charts: Sequence[Chart], path: Path | str, *, title: str) -> None:
    """Draw charts of the same series beside each other, with one y axis, one title and one legend.

    Args:
        charts: Charts of lines.
        path: File of the picture, whose ending decides the format.
        title: Title of all.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    with _style():
        figure = need("matplotlib.figure").Figure(figsize=(5.25 * len(charts), 4.4), layout="constrained")
        for axes, chart in zip(figure.subplots(1, len(charts), sharey=True), charts, strict=True):
            _fill(axes, chart)
            axes.label_outer()
        figure.suptitle(title, fontsize=13)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(2, len(handles)), frameon=False)
        figure.savefig(path, dpi=150, facecolor="white")


def inline_svg(chart: Chart, *, prefix: str) -> str:
    """Draw a chart as an SVG element for a page: no title, ink and grid from the page's CSS variables.

    The page's chips are the legend, unless the chart has one of its own, which chips leave alone.

    Each series is a group with the attribute `data-method`, so that a page can hide it.

    Args:
        chart: The chart.
        prefix: Start of its ids, which must differ from those of other charts on the page.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    lines = -(-sum(map(_stands_out, chart.series)) // 3) if chart.legend and chart.kind != "bar" else 0
    figure, axes = _figure(chart, 5.3, 3.7 + 0.2 * lines)
    text = io.StringIO()
    with _style():
        if lines:
            handles, labels = axes.get_legend_handles_labels()
            figure.legend(handles, labels, frameon=False, fontsize=10, handlelength=2.6, loc="outside lower center", ncols=3)
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    methods = {f"series-{one.place}": one.method for one in chart.series}
    attribute = "data-series" if chart.legend else "data-method"
    svg = re.sub(r'id="(series-\d+)"', lambda found: f'{attribute}="{escape(methods[found[1]])}"', svg)
    # Pictures share a page, and ids must not.
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{prefix}", svg)
    svg = re.sub(_INK, "var(--ink)", svg, flags=re.I)
    svg = re.sub(_FAINT, "var(--line)", svg, flags=re.I)
    # The size is the page's; only the proportions are the picture's.
    for side in ("width", "height"):
        svg = re.sub(rf'(<svg[^>]*?) {side}="[\d.]+pt"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(chart.title)}"', 1).strip()


def _style() -> Any:
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    plain = {"font.family": "sans-serif", "svg.fonttype": "none", "svg.hashsalt": "sparsekit"}
    return need("matplotlib").rc_context({**plain, **dict.fromkeys(inked, _INK)})


def _figure(chart: Chart, width: float, height: float) -> tuple[Any, Any]:
    if chart.kind == "bar":
        height = 0.9 + _BAR_INCHES * len(chart.series)
    with _style():
        figure = need("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        _fill(axes, chart)
    return figure, axes


def _fill(axes: Any, chart: Chart) -> None:
    axes.tick_params(labelsize=10)
    axes.grid(visible=True, axis="x" if chart.kind == "bar" else "both", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(chart.x, fontsize=10)
    axes.set_ylabel(chart.y, fontsize=10)
    {"bar": _bars, "front": _points}.get(chart.kind, _lines)(axes, chart)


def _lines(axes: Any, chart: Chart) -> None:
    bands = sum(map(_stands_out, chart.series)) <= _MOST_BANDS
    # Names of levels stand in the order of the axis, whatever the first series lacks.
    order = list(dict.fromkeys(x for one in chart.series for x in one.x)) if chart.kind == "level" else []
    for one in chart.series:
        colour, dashes, marker = series_style(one.place)
        x = [order.index(value) for value in one.x] if order else one.x
        if one.faint:
            axes.plot(x, one.y, color=_FAINT, linewidth=1.0, zorder=1)
            continue
        line = axes.plot(
            x, one.y, color=colour, linestyle=(0, dashes) if dashes else "-", marker=marker, markersize=4.5,
            markevery=max(1, len(x) // 8), linewidth=3.2 if one.subject else 1.6, label=one.label or one.method,
            zorder=3 if one.subject else 2,
        )[0]  # fmt: skip
        line.set_gid(f"series-{one.place}")
        if bands and any(one.deviation):
            low = [y - deviation for y, deviation in zip(one.y, one.deviation, strict=True)]
            high = [y + deviation for y, deviation in zip(one.y, one.deviation, strict=True)]
            band = axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            band.set_gid(f"series-{one.place}")
    _marks(axes, chart.marks, order)
    if order:
        axes.set_xticks(range(len(order)), [str(value) for value in order])
        axes.margins(x=0.08)
        _format(axes.yaxis, chart.unit)
    else:
        if chart.unit in ("flops", "seconds") and chart.scale == "log":
            _logarithmic(axes, chart)
        elif chart.unit == "number":
            axes.xaxis.set_major_locator(need("matplotlib.ticker").MaxNLocator(integer=True))  # rounds are whole
        _format(axes.xaxis, chart.unit)
        _format(axes.yaxis, chart.y_unit)
    if (chart.unit if order else chart.y_unit) == "share":
        _limit(axes, chart)


def _marks(axes: Any, marks: Sequence[Mark], order: Sequence[float | str]) -> None:
    """Draw numbers of somebody else as hollow diamonds, and one line of the legend for all of them."""
    for mark in marks:
        colour = series_style(mark.place)[0]
        x = order.index(mark.x) if order else mark.x
        bars = axes.errorbar([x], [mark.y], [mark.deviation], color=colour, marker="D", markersize=8, linestyle="none",
                             markerfacecolor="none", markeredgewidth=1.8, elinewidth=1.0, zorder=4)  # fmt: skip
        for part in (bars.lines[0], *bars.lines[2]):
            part.set_gid(f"series-{mark.place}")
    if marks:
        axes.plot([], [], "D", color=_INK, markersize=7, markerfacecolor="none", markeredgewidth=1.5, label="published")


def _logarithmic(axes: Any, chart: Chart) -> None:
    ticker = need("matplotlib.ticker")
    values = [float(x) for one in chart.series for x in one.x if float(x) > 0]
    if len(values) < 2 or min(values) == max(values):
        return
    axes.set_xscale("log")
    # Over few decades the powers of ten alone are too few ticks.
    decades = math.log10(max(values) / min(values))
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1,) if decades > 4 else (1, 3) if decades > 1.7 else (1, 2, 5)))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())


def _points(axes: Any, chart: Chart) -> None:
    """Draw a point per method, a line through the best, and the names of these and of the subject."""
    front = on_front(chart.series)
    for one in chart.series:
        colour, _, marker = series_style(one.place)
        size = 9 if one.subject else 6
        bars = axes.errorbar(one.x, one.y, one.deviation, color=colour, marker=marker, markersize=size, linestyle="none",
                             elinewidth=1.0, label=one.label or one.method, zorder=3)  # fmt: skip
        for part in (bars.lines[0], *bars.lines[2]):
            part.set_gid(f"series-{one.place}")
    for one in _apart([*(one for one in chart.series if one.subject), *front]):
        axes.annotate(
            one.method, (float(one.x[0]), one.y[0]), (6, -4), textcoords="offset points", fontsize=10, va="top", color=_INK,
            weight="bold" if one.subject else "normal",
        ).set_gid(f"series-{one.place}")  # fmt: skip
    axes.plot([one.x[0] for one in front], [one.y[0] for one in front], color=_INK, linewidth=1.0, linestyle=":", zorder=1)
    _logarithmic(axes, chart)
    axes.margins(x=0.12)
    _spread(axes, [one.y[0] for one in chart.series])
    _format(axes.xaxis, chart.unit)
    _format(axes.yaxis, "share")


def _spread(axes: Any, shares: Sequence[float]) -> None:
    """Give accuracies near 1 as much room as others, by a logit scale, where some are near and some are not."""
    if not (0.0 < min(shares) < 0.9 and 0.95 < max(shares) < 1.0):
        return
    low, high = min(shares), max(shares)
    ticks = [share for share in _SHARES if low / 2 < share < (1 + high) / 2]
    axes.set_yscale("logit")
    axes.set_ylim(low * 0.9, 1 - (1 - high) / 2)
    axes.yaxis.set_major_locator(need("matplotlib.ticker").FixedLocator(ticks))
    axes.yaxis.set_minor_locator(need("matplotlib.ticker").NullLocator())


def _apart(wanted: Sequence[Series]) -> list[Series]:
    """Leave out points whose names would lie on those of points before them."""
    kept: list[Series] = []
    for one in wanted:
        if all(abs(math.log(float(one.x[0]) / float(other.x[0]))) > 0.5 or abs(one.y[0] - other.y[0]) > 0.05 for other in kept):
            kept.append(one)
    return kept


def _bars(axes: Any, chart: Chart) -> None:
    for place, one in enumerate(chart.series):
        colour = _GREY if one.faint else series_style(one.place)[0]
        for y, deviation in zip(one.y, one.deviation, strict=True):
            bar = axes.barh(place, y, height=0.66, color=colour, alpha=0.95 if one.subject else 0.6)[0]
            bar.set_gid(f"series-{one.place}")
            if deviation:
                whisker = axes.plot([max(0.0, y - deviation), y + deviation], [place, place], color=_INK, linewidth=1.2)[0]
                whisker.set_gid(f"series-{one.place}")
        if one.second is not None:
            ring = axes.plot([one.second], [place], "o", markersize=5, markerfacecolor="none", markeredgecolor=_INK)[0]
            ring.set_gid(f"series-{one.place}")
    axes.set_yticks(range(len(chart.series)), [one.label or one.method for one in chart.series])
    for one, name in zip(chart.series, axes.get_yticklabels(), strict=True):
        name.set_weight("bold" if one.subject else "normal")
    axes.set_ylim(len(chart.series) - 0.4, -0.6)
    axes.xaxis.set_major_locator(need("matplotlib.ticker").MaxNLocator(5))
    _format(axes.xaxis, chart.unit)
    axes.set_xlim(left=0.0)
    if chart.unit == "share":
        axes.set_xlim(0.0, 1.02)


_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999)
_TICKS: dict[Unit, Callable[[float], str]] = {
    "share": lambda value: f"{round(100 * value, 3):g}%" if value <= 1.0001 else "",
    "flops": flops_text,
    "seconds": lambda value: f"{value:g} s",
}


def _format(axis: Any, unit: Unit) -> None:
    if unit in _TICKS:
        axis.set_major_formatter(need("matplotlib.ticker").FuncFormatter(lambda value, _: _TICKS[unit](value)))


def _limit(axes: Any, chart: Chart) -> None:
    """Spend the height on where series differ, not on the first rounds."""
    lowest = min(_low(one, early=chart.kind == "curve") for one in [*filter(_stands_out, chart.series)] or chart.series)
    highest = max(y + deviation for one in chart.series for y, deviation in zip(one.y, one.deviation, strict=True))
    for mark in chart.marks:
        lowest, highest = min(lowest, mark.y - mark.deviation), max(highest, mark.y + mark.deviation)
    room = max(0.01, 0.06 * (highest - lowest))
    axes.set_ylim(max(0.0, lowest - room), min(1.0, highest) + room)


def _stands_out(one: Series) -> bool:
    return not one.faint


def _low(one: Series, *, early: bool) -> float:
    values = sorted(one.y)
    return values[len(values) // 10] if early else values[0] - max(one.deviation)
