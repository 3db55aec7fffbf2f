"""Figures 3 and 4: test accuracy against FLOPs, by the paper's count, and against simulated running time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from sparsekit_fl.paper.figures.common import (
    as_in_the_paper,
    is_rival,
    level_of_figure,
    marks_at,
    own_method,
    plate_of,
    short_seconds,
)
from sparsekit_fl.report.chart import Chart, Series
from sparsekit_fl.report.comparison import Comparison
from sparsekit_fl.report.curves import Curve, curves_of, metrics_of
from sparsekit_fl.report.plate import Plate
from sparsekit_fl.report.table import flops_text, share_text, spread

__all__ = ["accuracy_against_flops", "accuracy_against_time", "best_within"]

Axis = Literal["flops_rowmask", "seconds"]


def accuracy_against_flops(comparison: Comparison) -> Plate | None:
    """Make Figure 3; None without FedLPS and a rival that were scored more than once.

    Args:
        comparison: Results under one protocol.
    """
    return _figure(
        comparison, "flops_rowmask", number="Figure 3", name="paper-3-accuracy-flops", title="test accuracy against FLOPs",
        x="FLOPs of all clients so far, counted as in the paper (row mask)",
    )  # fmt: skip


def accuracy_against_time(comparison: Comparison) -> Plate | None:
    """Make Figure 4; None without FedLPS and a rival that were scored more than once.

    Args:
        comparison: Results under one protocol.
    """
    return _figure(
        comparison, "seconds", number="Figure 4", name="paper-4-accuracy-time", title="test accuracy against running time",
        x="simulated seconds so far",
    )  # fmt: skip


def _figure(comparison: Comparison, axis: Axis, *, number: str, name: str, title: str, x: str) -> Plate | None:
    curves = _curves(comparison)
    own = next((curve for curve in curves if curve.method == own_method(comparison)), None)
    if own is None or not any(is_rival(curve.method) for curve in curves):
        return None
    series = tuple(
        Series(
            method=curve.method,
            place=comparison.places[curve.method],
            x=tuple(map(float, getattr(curve, axis))),
            y=tuple(map(float, curve.accuracy)),
            deviation=tuple(map(float, curve.deviation)),
        )
        for curve in curves
        if all(map(math.isfinite, getattr(curve, axis)))
    )
    flops = axis == "flops_rowmask"
    chart = Chart(
        name=name, title=title, kind="curve", series=series, x=x, y="mean personal accuracy on test data",
        unit="flops" if flops else "seconds", scale="linear", marks=marks_at(comparison) if flops else (),
    )  # fmt: skip
    found = _found(own, curves, axis) + (_left_out(comparison, own.method) if flops else "")
    return plate_of(comparison, number, as_in_the_paper(comparison, chart), found)


def _curves(comparison: Comparison) -> list[Curve]:
    level = level_of_figure(comparison)
    section = comparison.section
    results = [
        trial.result
        for method in section.methods
        for trial in (section.of(method, level) if level is not None else ())
        if trial.result
    ]
    if not results or "accuracy" not in metrics_of(results):
        return []
    return [curve for curve in curves_of(results) if len(curve.rounds) > 1]


def best_within(curves: Sequence[Curve], axis: Axis, limit: float) -> tuple[str, float] | None:
    """Return the rival that was most accurate at no more than a cost, and its accuracy; None where none had been scored.

    Args:
        curves: Of all methods.
        axis: What is spent.
        limit: How much of it.
    """
    found = [
        (float(accuracy), curve.method)
        for curve in curves
        if is_rival(curve.method)
        for spent, accuracy in zip(getattr(curve, axis), curve.accuracy, strict=True)
        if spent <= limit
    ]
    return (max(found)[1], max(found)[0]) if found else None


def _left_out(comparison: Comparison, method: str) -> str:
    """Name what the count lacks: passes by which a method decides while it trains; empty where there are none."""
    level = level_of_figure(comparison)
    trials = comparison.section.of(method, level) if level is not None else []
    scoring = spread([float(trial.result["cost"].get("flops_scoring", 0)) for trial in trials if trial.result]).mean
    return f" Its passes that score while it trains, {flops_text(scoring)} FLOPs, are not counted." if scoring else ""


def _found(own: Curve, curves: Sequence[Curve], axis: Axis) -> str:
    limit, accuracy = float(getattr(own, axis)[-1]), float(own.accuracy[-1])
    spent = f"{flops_text(limit)} FLOPs" if axis == "flops_rowmask" else short_seconds(limit)
    best = best_within(curves, axis, limit)
    rest = "no rival had been scored by then" if best is None else f"the best rival by then, {best[0]}, {share_text(best[1])}"
    ahead = max((float(curve.accuracy[-1]), curve.method) for curve in curves if is_rival(curve.method))
    end = f"at the end of its run {ahead[1]} has {share_text(ahead[0])}"
    return f"after {spent} {own.method} has {share_text(accuracy)}, {rest}; {end}."
