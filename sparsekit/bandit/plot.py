"""A picture of a bandit: its pulls, its arms and what it believes. Needs the extra `report`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsekit.bandit.base import Bandit, Interval
from sparsekit.bandit.make import restore_bandit
from sparsekit.bandit.space import Box
from sparsekit.errors import InvalidValueError, MissingDependencyError, install_hint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = ["save_plot"]

_INK, _FAINT, _ARM, _BEST, _MAP = "#333333", "#DDDDDD", "#0072B2", "#D55E00", "viridis"
_DPI = 144


@dataclass(frozen=True)
class _Pulls:
    """What was told: names and intervals of the coordinates, points (pulls, coordinates), scores, and the best's place."""

    intervals: Mapping[str, Interval]
    points: Sequence[Sequence[float]]
    scores: Sequence[float]
    best: int


def save_plot(
    bandit: Bandit | Mapping[str, Any], path: Path | str, *, minimize: bool = False, metric: str = "reward", name: str = "value"
) -> None:
    """Draw a bandit.

    Over an interval: each pull at its value and reward, later ones darker; each arm as a line at its mean with a band of
    one standard error, and its index dotted; below, the values in the order in which they were tried. Over a box: the
    rewards along each of its intervals, and for two of them the points on the plane.

    Args:
        bandit: A bandit, or its `state_dict()`, fresh from a JSON file if you like.
        path: Where the picture goes; the ending says which kind, `.png`, `.svg` or `.pdf`.
        minimize: The rewards are the negatives of what is to be shown.
        metric: What the vertical axis is called.
        name: What the value of an interval is called; a box has names of its own.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        InvalidValueError: nothing has been told, the state is not one, or the ending is unknown.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(f"a picture needs matplotlib; {install_hint('report')}") from error
    known = restore_bandit(bandit) if isinstance(bandit, Mapping) else bandit
    sign = -1.0 if minimize else 1.0
    pulls = _pulls(known, sign, name)
    kinds = ("png", "svg", "pdf")
    if Path(path).suffix.lstrip(".").lower() not in kinds:
        raise InvalidValueError(f"path must end in .{', .'.join(kinds)}, got {str(path)!r}")
    settings: dict[Any, Any] = {"font.size": 10, "axes.edgecolor": _INK, "axes.spines.top": False, "axes.spines.right": False}
    # Constant names inside an SVG, and no date: equal pulls give equal files.
    settings |= {"svg.hashsalt": "sparsekit", "svg.fonttype": "none"}
    with mpl.rc_context(settings):
        if len(pulls.intervals) == 1:
            figure = Figure(figsize=(7.2, 5.4), layout="constrained")
            _draw_line(figure, known, pulls, sign, metric)
        else:
            columns = len(pulls.intervals) + (len(pulls.intervals) == 2)
            figure = Figure(figsize=(3.6 * min(columns, 4), 3.4 * math.ceil(columns / 4)), layout="constrained")
            _draw_box(figure, pulls, metric)
        figure.suptitle(f"{type(known).__name__}, {len(pulls.scores)} pulls", x=0.02, ha="left", fontsize=11)
        metadata = {"Date": None} if Path(path).suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=_DPI, metadata=metadata)


def _pulls(bandit: Bandit, sign: float, name: str) -> _Pulls:
    told = bandit.state_dict()["pulls"]["told"]
    if not told:
        raise InvalidValueError("no reward has been told yet, so there is nothing to draw; tell() one first")
    space: Interval | Box = getattr(bandit, "space")  # noqa: B009 - not of the protocol
    best = bandit.best().id
    place = next(place for place, (id, _, _) in enumerate(told) if id == best)
    scores = [sign * float(reward) for _, _, reward in told]
    if isinstance(space, Interval):
        return _Pulls({name: space}, [[float(value)] for _, value, _ in told], scores, place)
    points = [[float(value[key]) for key in space.names] for _, value, _ in told]
    return _Pulls(space.intervals, points, scores, place)


def _shades(count: int) -> Any:
    """How opaque each pull is: later ones more; float (count,), which matplotlib's types do not know of."""
    return np.linspace(0.25, 1.0, count)


def _prepare(axes: Axes, interval: Interval, label: str) -> None:
    axes.set_xlim(interval.low, interval.high)
    if interval.scale == "log":
        axes.set_xscale("log")
        _label_log(axes.xaxis, interval)
    axes.set_xlabel(label)
    axes.grid(color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)


def _label_log(axis: Axis, interval: Interval) -> None:
    """Where there are few powers of ten, 2 and 5 times them too, and no labels between that would overlap."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_minor_formatter(NullFormatter())
    if math.log10(interval.high / interval.low) < 3.0:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")


def _scatter(axes: Axes, values: Sequence[float], scores: Sequence[float], best: int, *, size: float) -> None:
    """Pulls and the best of them; not clipped, since pulls at the ends of the space lie on the frame."""
    dots: dict[str, Any] = {"s": size, "color": _INK, "linewidths": 0, "clip_on": False, "label": "pulls, later ones darker"}
    axes.scatter(values, scores, alpha=_shades(len(values)), **dots)
    _star(axes, values[best], scores[best], label="recommended")


def _star(axes: Axes, x: float, y: float, *, label: str | None = None) -> None:
    axes.plot(x, y, marker="*", markersize=14, color=_BEST, linestyle="none", clip_on=False, label=label)


def _draw_line(figure: Figure, bandit: Bandit, pulls: _Pulls, sign: float, metric: str) -> None:
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    (name, interval), values = next(iter(pulls.intervals.items())), [point[0] for point in pulls.points]
    _prepare(above, interval, "")
    _scatter(above, values, pulls.scores, pulls.best, size=16)
    _draw_arms(above, bandit, sign, pulls.scores)
    above.set_ylabel(metric)
    above.legend(loc="best", frameon=False, fontsize=8, markerscale=0.7)
    _prepare(below, interval, name)
    _scatter(below, values, range(1, len(values) + 1), pulls.best, size=9)
    below.set_ylabel("pull")
    below.invert_yaxis()


def _draw_arms(axes: Axes, bandit: Bandit, sign: float, scores: Sequence[float]) -> None:
    arms = list(getattr(bandit, "arms", ()))
    indices = [sign * index for index in bandit.indices()] if hasattr(bandit, "indices") else []
    seen = [arm for arm in arms if arm.pulls]
    said = "arms: mean ± standard error"
    points = [arm for arm in seen if arm.low == arm.high]
    if points:
        means, errors = [sign * arm.mean for arm in points], [_error(arm) for arm in points]
        style: dict[str, Any] = {"color": _ARM, "linestyle": "none", "marker": "_", "markersize": 14, "clip_on": False}
        axes.errorbar([arm.low for arm in points], means, errors, linewidth=1.5, label=said, **style)
    wide = [arm for arm in seen if arm.low < arm.high]
    if wide:
        lows, highs = [arm.low for arm in wide], [arm.high for arm in wide]
        axes.hlines([sign * arm.mean for arm in wide], lows, highs, colors=_ARM, linewidth=1.8, label=said)
        for arm in wide:
            mean, error = sign * arm.mean, _error(arm)
            axes.fill_between([arm.low, arm.high], mean - error, mean + error, color=_ARM, alpha=0.18, linewidth=0)
    span = (max(scores) - min(scores)) or 1.0
    # An index far above all rewards would squeeze them into a line.
    near = [(arm, index) for arm, index in zip(arms, indices) if min(scores) - span <= index <= max(scores) + span]
    near = [(arm, index) for arm, index in near if arm.low < arm.high]
    if near:
        levels, lows, highs = [i for _, i in near], [arm.low for arm, _ in near], [arm.high for arm, _ in near]
        axes.hlines(levels, lows, highs, colors=_ARM, linewidth=1.0, linestyles=":", label="arms: index")


def _error(arm: Any) -> float:
    return math.sqrt(arm.variance / arm.pulls)


def _draw_box(figure: Figure, pulls: _Pulls, metric: str) -> None:
    names = list(pulls.intervals)
    columns = len(names) + (len(names) == 2)
    panels = figure.subplots(math.ceil(columns / 4), min(columns, 4), squeeze=False).ravel()
    for place, name in enumerate(names):
        _prepare(panels[place], pulls.intervals[name], name)
        _scatter(panels[place], [point[place] for point in pulls.points], pulls.scores, pulls.best, size=16)
        panels[place].set_ylabel(metric)
    panels[0].legend(loc="best", frameon=False, fontsize=8, markerscale=0.7)
    for panel in panels[columns:]:
        panel.remove()
    if len(names) == 2:
        _draw_plane(figure, panels[2], pulls, names, metric)


def _draw_plane(figure: Figure, axes: Axes, pulls: _Pulls, names: Sequence[str], metric: str) -> None:
    _prepare(axes, pulls.intervals[names[0]], names[0])
    other = pulls.intervals[names[1]]
    axes.set_ylim(other.low, other.high)
    if other.scale == "log":
        axes.set_yscale("log")
        _label_log(axes.yaxis, other)
    axes.set_ylabel(names[1])
    points = list(zip(*pulls.points))
    shown = axes.scatter(points[0], points[1], c=pulls.scores, s=22, cmap=_MAP, linewidths=0, clip_on=False)
    best = pulls.points[pulls.best]
    _star(axes, best[0], best[1])
    figure.colorbar(shown, ax=axes, label=metric)
