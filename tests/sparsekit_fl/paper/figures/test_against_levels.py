"""Figures 6, 7 and 8: the levels in their order, leads in points, and the published level."""

from __future__ import annotations

from typing import Any

import pytest
from saved_results import SECONDS, result

from sparsekit_fl.paper.figures.against_levels import (
    accuracy_against_classes,
    accuracy_against_devices,
    time_against_devices,
)
from sparsekit_fl.report.comparison import Comparison
from sparsekit_fl.report.trials import Trial, sections_of


def _comparison(*results: dict[str, Any]) -> Comparison:
    (section,) = sections_of(map(Trial.of, results))
    return Comparison(section)


def test_figure_6_has_the_classes_that_clients_lack_and_the_table_at_eight() -> None:
    made = [
        result(name, lack_classes=lack, accuracies={100: best - lack / 100})
        for name, best in (("fedlps", 0.9), ("fedper", 0.8), ("local", 0.95))
        for lack in (8, 2)
    ]
    plate = accuracy_against_classes(_comparison(*made))
    assert plate is not None
    assert (plate.number, plate.chart.x, plate.chart.unit) == ("Figure 6", "classes that every client lacks", "share")
    assert {one.method: one.x for one in plate.chart.series} == dict.fromkeys(("fedlps", "fedper", "local"), ("2", "8"))
    assert plate.chart.series[0].y == pytest.approx((0.88, 0.82))
    assert {(mark.method, mark.x, round(mark.y, 4)) for mark in plate.chart.marks} == {
        ("fedlps", "8", 0.9677),
        ("fedper", "8", 0.9345),
    }
    assert "fedlps less the best rival, in points: −5.0 (2), −5.0 (8)." in plate.caption


def test_figures_7_and_8_have_the_levels_of_devices() -> None:
    made = [
        result(name, heterogeneity=level, accuracies={100: value})
        for name, value in (("fedlps", 0.9), ("fedavg", 0.8))
        for level in ("high", "low", "median")
    ]
    for each in made:
        if each["method"] == "fedlps":
            each["cost"]["simulated_seconds"] = 10.0
    comparison = _comparison(*made)
    accuracy, time = accuracy_against_devices(comparison), time_against_devices(comparison)
    assert accuracy is not None
    assert time is not None
    assert accuracy.chart.series[0].x == time.chart.series[0].x == ("low", "median", "high")
    assert {mark.x for mark in accuracy.chart.marks} == {"high"}
    assert "+10.0 (low), +10.0 (median), +10.0 (high)" in accuracy.caption
    assert (time.number, time.chart.unit, time.chart.marks) == ("Figure 8", "seconds", ())
    assert {one.method: one.y for one in time.chart.series} == {"fedlps": (10.0,) * 3, "fedavg": (100 * SECONDS,) * 3}
    assert "shorter than its rivals by 80 to 80 % (low)" in time.caption
    assert "from low to high its own time changes by +0 %" in time.caption


def test_one_level_or_no_rival_makes_no_figure() -> None:
    one = _comparison(result("fedlps", lack_classes=8), result("fedper", lack_classes=8))
    assert accuracy_against_classes(one) is None
    alone = _comparison(*(result("fedlps", heterogeneity=level) for level in ("low", "high")))
    assert accuracy_against_devices(alone) is None
