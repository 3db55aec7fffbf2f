"""Chart: what is in one picture, as data; `charts` makes them and `drawing` draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Chart", "Mark", "Series", "Unit", "on_front"]

Unit = Literal["share", "flops", "seconds", "number"]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One method in a chart.

    Args:
        method: Name of the method.
        place: Its place among the methods of the section, which decides colour, dashes and marker in every chart.
        x: Numbers, or names of levels; a bar has none.
        y: As many.
        deviation: As many; zeros for a single run.
        second: Second value of a bar, drawn as a ring; None for none.
        subject: Drawn so that it is told from the rest.
        label: Text of the legend, or of a bar; empty for the method.
        faint: Drawn in grey behind the others, without a line in the legend.
    """

    method: str
    place: int
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    deviation: tuple[float, ...]
    second: float | None = None
    subject: bool = False
    label: str = ""
    faint: bool = False


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A number of somebody else beside a series: a hollow diamond of its colour.

    Args:
        method: Name of the method.
        place: As in `Series`.
        x: Number, or name of a level.
        y: Its value.
        deviation: Deviation of y; 0 where none is known.
    """

    method: str
    place: int
    x: float | str
    y: float
    deviation: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One picture.

    Args:
        name: Name of its file.
        title: Text above it.
        kind: "curve" and "level" are lines, "bar" is one bar per series, "front" is one point per series with a line through
            those that no other series beats in both numbers.
        series: Methods that are drawn.
        x: Text of the x axis; for bars that of their length.
        y: Text of the y axis; empty for bars.
        unit: Unit of x for curves, of the length for bars, of y for levels.
        y_unit: Unit of y for curves.
        scale: Scale of the x axis of curves in FLOPs or seconds.
        marks: Numbers of somebody else.
        legend: Whether it has a legend of its own on a page, too, where the page's chips are that of the others.
    """

    name: str
    title: str
    kind: Literal["curve", "level", "bar", "front"]
    series: tuple[Series, ...]
    x: str
    y: str
    unit: Unit
    y_unit: Unit = "share"
    scale: Literal["log", "linear"] = "log"
    marks: tuple[Mark, ...] = ()
    legend: bool = False


def on_front(series: Sequence[Series]) -> tuple[Series, ...]:
    """Return the points that no other beats in both numbers, from few FLOPs to many.

    Args:
        series: One point each.
    """
    front: list[Series] = []
    for one in sorted(series, key=lambda one: (float(one.x[0]), -one.y[0])):
        if not front or one.y[0] > front[-1].y[0]:
            front.append(one)
    return tuple(front)
