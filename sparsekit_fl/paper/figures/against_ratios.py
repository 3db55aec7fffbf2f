"""Figure 9: accuracy against one sparse ratio for all clients, by how units are chosen, and the time that ratios take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from sparsekit_fl.paper.figures.common import level_of_figure, plate_of, points_text
from sparsekit_fl.report.chart import Chart, Series
from sparsekit_fl.report.comparison import Comparison, Row
from sparsekit_fl.report.plate import Plate
from sparsekit_fl.report.trials import Trial

__all__ = ["accuracy_against_ratios", "time_against_ratios"]

_STRATEGIES: Mapping[str, str] = {
    "flst": "learned", "fedlps": "learned", "fedlps-random": "random", "fedlps-ordered": "ordered",
    "fedlps-magnitude": "magnitude",
}  # fmt: skip
_RATIO = re.compile(r"Constant\((?:ratio=)?([\d.]+)")


@dataclass(frozen=True)
class _Point:
    strategy: str
    ratio: float
    row: Row


def accuracy_against_ratios(comparison: Comparison) -> Plate | None:
    """Make the upper part of Figure 9; None without two ways to choose units, each at two ratios.

    Args:
        comparison: Results under one protocol.
    """
    series = _series(comparison, "personal_accuracy")
    if len(series) < 2:
        return None
    chart = _chart(series, "paper-9a-accuracy-ratios", "test accuracy against sparse ratios",
                   "mean personal accuracy on test data", "share")  # fmt: skip
    return plate_of(comparison, "Figure 9", chart, _leads(series))


def time_against_ratios(comparison: Comparison) -> Plate | None:
    """Make the lower part of Figure 9, of learned patterns alone; None where they have fewer than two ratios.

    Args:
        comparison: Results under one protocol.
    """
    series = tuple(one for one in _series(comparison, "simulated_seconds") if one.label == "learned")
    if not series:
        return None
    chart = _chart(series, "paper-9b-time-ratios", "running time against sparse ratios, learned patterns",
                   "simulated seconds of the run", "seconds")  # fmt: skip
    (one,) = series
    accuracy = next((found for found in _series(comparison, "personal_accuracy") if found.label == "learned"), None)
    gain = "" if accuracy is None else f" and accuracy by {100 * (accuracy.y[-1] - accuracy.y[0]):+.1f} points"
    text = f"from ratio {one.x[0]:g} to {one.x[-1]:g} time grows by a factor of {one.y[-1] / one.y[0]:.1f}{gain}."
    return plate_of(comparison, "Figure 9", chart, text.replace("-", "−"))


def _ratio_of(trial: Trial) -> float | None:
    """The one ratio of all clients; None where a bandit or the capability decides it."""
    found = _RATIO.match(str(trial.policies.get("ratio", "")))
    return float(found[1]) if found else None


def _points(comparison: Comparison) -> list[_Point]:
    level, points = level_of_figure(comparison), []
    for row in comparison.rows:
        strategy = _STRATEGIES.get(row.method.partition("[")[0])
        trials = comparison.section.of(row.method, row.level)
        ratio = _ratio_of(trials[0])
        if row.level == level and strategy is not None and ratio is not None:
            points.append(_Point(strategy, ratio, row))
    return points


def _series(comparison: Comparison, column: str) -> tuple[Series, ...]:
    groups: dict[str, dict[float, Row]] = {}
    for point in _points(comparison):
        groups.setdefault(point.strategy, {})[point.ratio] = point.row
    made = []
    for place, strategy in enumerate(dict.fromkeys(_STRATEGIES.values())):
        rows = sorted(groups.get(strategy, {}).items())
        known = [(ratio, row.numbers[column]) for ratio, row in rows if row.numbers[column].mean is not None]
        if len(known) > 1:
            made.append(
                Series(
                    method=f"units {strategy}",
                    place=place,
                    x=tuple(ratio for ratio, _ in known),
                    y=tuple(value.mean or 0.0 for _, value in known),
                    deviation=tuple(value.deviation or 0.0 for _, value in known),
                    subject=strategy == "learned",
                    label=strategy,
                )
            )
    return tuple(made)


def _chart(series: tuple[Series, ...], name: str, title: str, y: str, y_unit: str) -> Chart:
    return Chart(
        name=name, title=title, kind="curve", series=series, x="sparse ratio of all clients", y=y, unit="share",
        y_unit="seconds" if y_unit == "seconds" else "share", legend=True,
    )  # fmt: skip


def _leads(series: tuple[Series, ...]) -> str:
    learned = next((one for one in series if one.label == "learned"), None)
    if learned is None:
        return "no run with learned patterns."
    leads = []
    for ratio, y in zip(learned.x, learned.y, strict=True):
        others = [one.y[one.x.index(ratio)] for one in series if one is not learned and ratio in one.x]
        if others:
            leads.append((f"{ratio:g}", y - max(others)))
    return f"learned patterns less the best of the others, in points: {points_text(leads)}."
