"""Figure 9: one ratio for all, by how units are chosen."""

from __future__ import annotations

from typing import Any

import pytest
from saved_results import SECONDS, result

from sparsekit_fl.paper.figures.against_ratios import accuracy_against_ratios, time_against_ratios
from sparsekit_fl.report.comparison import Comparison
from sparsekit_fl.report.trials import Trial, sections_of


def _run(name: str, ratio: float | None, accuracy: float, seed: int = 0) -> dict[str, Any]:
    made = result(name if ratio is None else f"{name}[ratio={ratio}]", seed, accuracies={100: accuracy})
    made["policies"] = {"ratio": "BanditRatio(low=0.0625)" if ratio is None else f"Constant(ratio={ratio})"}
    made["cost"]["simulated_seconds"] = 100 * SECONDS * (ratio or 1.0)
    return made


def _comparison(*results: dict[str, Any]) -> Comparison:
    (section,) = sections_of(map(Trial.of, results))
    return Comparison(section)


def test_each_choice_of_units_is_a_line_over_the_ratios() -> None:
    comparison = _comparison(
        _run("flst", 0.8, 0.9), _run("flst", 0.2, 0.7), _run("flst", 0.2, 0.8, seed=1), _run("flst", 0.8, 0.9, seed=1),
        _run("fedlps-random", 0.2, 0.6), _run("fedlps-random", 0.8, 0.95), _run("fedlps-ordered", 0.2, 0.6),
        _run("fedlps", None, 0.99),
    )  # fmt: skip
    plate = accuracy_against_ratios(comparison)
    assert plate is not None
    chart = plate.chart
    assert (chart.unit, chart.y_unit, chart.legend) == ("share", "share", True)
    assert [(one.label, one.x, one.subject) for one in chart.series] == [
        ("learned", (0.2, 0.8), True),
        ("random", (0.2, 0.8), False),
    ], "one ratio is no line, and what a bandit decides is none"
    assert chart.series[0].y == pytest.approx((0.75, 0.9))
    assert chart.series[0].deviation == pytest.approx((0.005**0.5, 0.0))
    assert "+15.0 (0.2), −5.0 (0.8)" in plate.caption
    time = time_against_ratios(comparison)
    assert time is not None
    assert [one.label for one in time.chart.series] == ["learned"]
    assert time.chart.series[0].y == pytest.approx((10.0, 40.0))
    assert "time grows by a factor of 4.0 and accuracy by +15.0 points" in time.caption


def test_one_choice_of_units_has_a_time_but_no_comparison() -> None:
    comparison = _comparison(_run("flst", 0.2, 0.7), _run("flst", 0.8, 0.9))
    assert accuracy_against_ratios(comparison) is None
    assert time_against_ratios(comparison) is not None
