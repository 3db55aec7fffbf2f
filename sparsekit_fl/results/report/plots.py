"""Figures, and the plots that draw them: lines over numbers or levels, bars and a front.

Equal figures give equal bytes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sparsekit_fl.errors import need
from sparsekit_fl.results.text import scale

# Okabe and Ito's colours, which remain distinct to colour-blind readers, and two more that show on light and dark alike.
_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D4F", "#808080")
_DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.2, 1.6), (6, 2, 1.2, 2))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_INK, _FAINT, _GREY = "#333333", "#DDDDDD", "#A0A8B0"
_STYLE = {
    "font.family": "sans-serif", "svg.fonttype": "none", "svg.hashsalt": "sparsekit",
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}  # fmt: skip
_MOST_BANDS = 8
_MOST_BELOW = 6
_BAR_INCHES = 0.27
_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999)


@dataclass(frozen=True, kw_only=True, eq=False)
class Figure:
    """One picture.

    Args:
        name: Name of its file.
        title: Text above it.
        plot: "lines" over numbers or names, "bars" is one bar per series, "front" one point per series with a line through
            those that no other series beats in both numbers.
        points: DataFrame with the columns series, x, y, deviation; bars have their length in y, NaN for none.
        series: Names in the order that decides colour, dashes and marker, of more series than are drawn perhaps.
        x: Text of the x axis; of bars that of their length.
        y: Text of the y axis; empty for bars.
        x_unit: Unit of x, and of the length of bars: "share", "flops", "seconds", "number" or "name".
        y_unit: Unit of y.
        log: Whether the x axis is logarithmic.
        subject: Series that is told from the rest.
        faint: Series drawn in grey, without a line in the legend.
        labels: Series → text of the legend, where that is not its name.
        marks: DataFrame like `points` of published numbers, drawn as hollow diamonds; rings on bars. None for none.
        number: Number of a figure of a paper; empty for other figures.
        caption: Sentences below it.
    """

    name: str
    title: str
    plot: Literal["lines", "bars", "front"]
    points: Any
    series: tuple[str, ...]
    x: str
    y: str = ""
    x_unit: str = "number"
    y_unit: str = "share"
    log: bool = False
    subject: str = ""
    faint: frozenset[str] = frozenset()
    labels: Mapping[str, str] = field(default_factory=dict)
    marks: Any = None
    number: str = ""
    caption: str = ""

    @property
    def shown(self) -> list[str]:
        """Series that have points, in the order of `series`."""
        there = set(self.points["series"])
        return [name for name in self.series if name in there]

    @property
    def named(self) -> list[str]:
        """Series that have a line in the legend."""
        return [name for name in self.shown if name not in self.faint]

    def style(self, series: str) -> tuple[str, tuple[float, ...], str]:
        """Return colour, dashes and marker of a series by its place in `series`; distinct for 32 of them."""
        place = self.series.index(series)
        turn = place // len(_COLOURS)
        return _COLOURS[place % len(_COLOURS)], _DASHES[turn % len(_DASHES)], _MARKERS[(place + turn) % len(_MARKERS)]


def draw(figure: Figure, *paths: Path | str) -> None:
    """Draw a figure with its title and legend into files, whose endings decide the format.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    lines, (width, height), legend = len(figure.named), (6.4, 4.3), {"loc": "outside lower center", "ncols": 3}
    if figure.plot == "bars":
        height = 0.9 + _BAR_INCHES * len(figure.shown)
    elif lines > _MOST_BELOW:
        # A legend at the side needs a line per series.
        width, height, legend = 8.6, max(height, 0.6 + 0.195 * lines), {"loc": "outside right upper"}
    with need("matplotlib").rc_context(_STYLE):
        picture = need("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
        axes = picture.subplots()
        axes.set_title(figure.title, fontsize=11, loc="left")
        axes.tick_params(labelsize=10)
        axes.grid(visible=True, axis="x" if figure.plot == "bars" else "both", color=_FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel(figure.x, fontsize=10)
        axes.set_ylabel(figure.y, fontsize=10)
        {"lines": _lines, "bars": _bars, "front": _front}[figure.plot](axes, figure)
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            picture.legend(handles, labels, frameon=False, handlelength=3.0, fontsize=9, **legend)
        for path in paths:
            metadata = {"Date": None} if str(path).endswith(".svg") else None
            picture.savefig(path, dpi=150, facecolor="white", metadata=metadata)


def _format(axis: Any, unit: str, values: Any) -> None:
    """Write the ticks of an axis in its unit."""
    if unit not in ("share", "flops", "seconds"):
        return
    size, letter = scale(unit, values.max())

    def text(value: float, _: int) -> str:
        if unit == "share":
            return f"{round(100 * value, 3):g}%" if value <= 1.0001 else ""
        if unit == "flops":
            return f"{value / size:g}{letter}" if value else "0"
        return f"{value:g} s"

    axis.set_major_formatter(need("matplotlib.ticker").FuncFormatter(text))


def _lines(axes: Any, figure: Figure) -> None:
    """Draw a line per series over numbers or names, with a band of one deviation."""
    if figure.x_unit == "name":
        axes.xaxis.update_units(list(dict.fromkeys(figure.points["x"])))
    bands = len(figure.named) <= _MOST_BANDS
    for name in figure.shown:
        own = figure.points[figure.points["series"] == name]
        x, y, deviation = (own[column].to_numpy() for column in ("x", "y", "deviation"))
        if name in figure.faint:
            axes.plot(x, y, color=_FAINT, linewidth=1.0, zorder=1)
            continue
        colour, dashes, marker = figure.style(name)
        main = name == figure.subject
        axes.plot(
            x, y, color=colour, linestyle=(0, dashes) if dashes else "-", marker=marker, markersize=4.5,
            markevery=max(1, len(x) // 8), linewidth=3.2 if main else 1.6, label=figure.labels.get(name, name),
            zorder=3 if main else 2,
        )  # fmt: skip
        if bands and deviation.any():
            axes.fill_between(x, y - deviation, y + deviation, color=colour, alpha=0.15, linewidth=0)
    _marks(axes, figure)
    if figure.log:
        _logarithmic(axes, figure)
    elif figure.x_unit == "number":
        axes.xaxis.set_major_locator(need("matplotlib.ticker").MaxNLocator(integer=True))  # rounds are whole
    elif figure.x_unit == "name":
        axes.margins(x=0.08)
    if figure.y_unit == "share":
        _limit(axes, figure)
    _format(axes.xaxis, figure.x_unit, figure.points["x"])
    _format(axes.yaxis, figure.y_unit, figure.points["y"])


def _bars(axes: Any, figure: Figure) -> None:
    """Draw a bar per series, in the order of the points, the first one above; published numbers are rings."""
    points, places = figure.points, range(len(figure.points))
    fills = [
        (_GREY if name in figure.faint else figure.style(name)[0], 0.95 if name == figure.subject else 0.6)
        for name in points["series"]
    ]
    spread = {"xerr": points["deviation"], "ecolor": _INK, "error_kw": {"elinewidth": 1.2}}
    axes.barh(places, points["y"], height=0.66, color=fills, **spread)
    if figure.marks is not None:
        rings = points[["series"]].merge(figure.marks, how="left")["y"]
        axes.plot(rings, places, "o", markersize=5, markerfacecolor="none", markeredgecolor=_INK)
    axes.set_yticks(places, [figure.labels.get(name, name) for name in points["series"]])
    for name, label in zip(points["series"], axes.get_yticklabels(), strict=True):
        label.set_weight("bold" if name == figure.subject else "normal")
    axes.set_ylim(len(points) - 0.4, -0.6)
    axes.xaxis.set_major_locator(need("matplotlib.ticker").MaxNLocator(5))
    axes.set_xlim(0.0, 1.02 if figure.x_unit == "share" else None)
    _format(axes.xaxis, figure.x_unit, points["y"])


def _front(axes: Any, figure: Figure) -> None:
    """Draw a point per series, a line through the best, and the names of these and of the subject."""
    for one in figure.points.itertuples():
        colour, _, marker = figure.style(one.series)
        size = 9 if one.series == figure.subject else 6
        axes.errorbar([one.x], [one.y], [one.deviation], color=colour, marker=marker, markersize=size, linestyle="none",
                      elinewidth=1.0, label=figure.labels.get(one.series, one.series), zorder=3)  # fmt: skip
    ranked = figure.points.sort_values(["x", "y"], ascending=[True, False])
    best = ranked[ranked["y"] > ranked["y"].cummax().shift(fill_value=-math.inf)]
    axes.plot(best["x"], best["y"], color=_INK, linewidth=1.0, linestyle=":", zorder=1)
    written: list[Any] = []
    for one in [*ranked[ranked["series"] == figure.subject].itertuples(), *best.itertuples()]:
        # Names that would lie on those before them are left out.
        if all(abs(math.log(one.x / other.x)) > 0.5 or abs(one.y - other.y) > 0.05 for other in written):
            written.append(one)
            axes.annotate(one.series, (one.x, one.y), (6, -4), textcoords="offset points", fontsize=10, va="top",
                          color=_INK, weight="bold" if one.series == figure.subject else "normal")  # fmt: skip
    _logarithmic(axes, figure)
    axes.margins(x=0.12)
    low, high = figure.points["y"].min(), figure.points["y"].max()
    if 0.0 < low < 0.9 and 0.95 < high < 1.0:
        # Accuracies near 1 get as much room as others.
        axes.set_yscale("logit")
        axes.set_ylim(low * 0.9, 1 - (1 - high) / 2)
        ticker = need("matplotlib.ticker")
        axes.yaxis.set_major_locator(ticker.FixedLocator([share for share in _SHARES if low / 2 < share < (1 + high) / 2]))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    _format(axes.xaxis, figure.x_unit, figure.points["x"])
    _format(axes.yaxis, figure.y_unit, figure.points["y"])


def _marks(axes: Any, figure: Figure) -> None:
    """Draw published numbers as hollow diamonds, and one line of the legend for all of them."""
    for one in () if figure.marks is None else figure.marks.itertuples():
        axes.errorbar([one.x], [one.y], [one.deviation], color=figure.style(one.series)[0], marker="D",
                      markersize=8, linestyle="none", markerfacecolor="none", markeredgewidth=1.8, elinewidth=1.0,
                      zorder=4)  # fmt: skip
    if figure.marks is not None:
        axes.plot([], [], "D", color=_INK, markersize=7, markerfacecolor="none", markeredgewidth=1.5, label="published")


def _logarithmic(axes: Any, figure: Figure) -> None:
    ticker = need("matplotlib.ticker")
    values = figure.points["x"][figure.points["x"] > 0]
    if len(values) < 2 or values.min() == values.max():
        return
    axes.set_xscale("log")
    # Over few decades the powers of ten alone are too few ticks.
    decades = math.log10(values.max() / values.min())
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1,) if decades > 4 else (1, 3) if decades > 1.7 else (1, 2, 5)))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())


def _limit(axes: Any, figure: Figure) -> None:
    """Spend the height on where series differ, not on the first rounds."""
    clear = figure.points[figure.points["series"].isin(figure.named or figure.shown)]
    groups = clear["y"].groupby(clear["series"])
    named = figure.x_unit == "name"
    lowest = (clear["y"] - clear["deviation"]).min() if named else groups.apply(lambda y: sorted(y)[len(y) // 10]).min()
    highest = (clear["y"] + clear["deviation"]).max()
    for one in () if figure.marks is None else figure.marks.itertuples():
        lowest, highest = min(lowest, one.y - one.deviation), max(highest, one.y + one.deviation)
    room = max(0.01, 0.06 * (highest - lowest))
    axes.set_ylim(max(0.0, lowest - room), min(1.0, highest) + room)
