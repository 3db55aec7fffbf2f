"""Figures 3 and 4: axes, series, published marks, and the sentence that compares at equal cost."""

from __future__ import annotations

from typing import Any

import pytest
from saved_results import SECONDS, result

from sparsekit_fl.paper.figures.against_cost import accuracy_against_flops, accuracy_against_time
from sparsekit_fl.report.comparison import Comparison
from sparsekit_fl.report.trials import Trial, sections_of


def _comparison(*results: dict[str, Any]) -> Comparison:
    (section,) = sections_of(map(Trial.of, results))
    return Comparison(section)


def test_figure_3_counts_flops_as_the_paper_does_and_has_its_table_beside() -> None:
    plate = accuracy_against_flops(
        _comparison(
            result("fedlps", flops_rowmask=0.8e12, accuracies={50: 0.9, 100: 0.98}),
            result("fedlps", 1, flops_rowmask=0.8e12, accuracies={50: 0.8, 100: 0.96}),
            result("fedavg", accuracies={50: 0.7, 100: 0.9}),
            result("flst"),
        )
    )
    assert plate is not None
    chart = plate.chart
    assert (plate.number, chart.kind, chart.unit, chart.y_unit, chart.scale) == (
        "Figure 3",
        "curve",
        "flops",
        "share",
        "linear",
    )
    own, rival = chart.series
    assert (own.method, own.subject, rival.method, rival.subject) == ("fedlps", True, "fedavg", False)
    assert own.x == pytest.approx((0.4e12, 0.8e12))
    assert own.y == pytest.approx((0.85, 0.97))
    assert own.deviation == pytest.approx((0.005**0.5, 0.0002**0.5))
    assert [(mark.method, mark.x, mark.y, mark.deviation) for mark in chart.marks] == [
        ("fedlps", 0.8e12, pytest.approx(0.9677), pytest.approx(0.0011)),
        ("fedavg", 2.8e12, pytest.approx(0.8815), pytest.approx(0.0114)),
    ]
    assert "after 0.8T FLOPs fedlps has 97.0%, no rival had been scored by then" in plate.caption
    assert "over 2 seeds" in plate.caption


def test_what_the_count_leaves_out_is_named() -> None:
    own = result("fedlps")
    own["cost"]["flops_scoring"] = 3 * 10**9
    plate = accuracy_against_flops(_comparison(own, result("fedavg")))
    assert plate is not None
    assert "Its passes that score while it trains, 3G FLOPs, are not counted." in plate.caption


def test_another_protocol_has_no_published_marks_and_says_so() -> None:
    plate = accuracy_against_flops(_comparison(*(result(name, rounds=60) for name in ("fedlps", "fedavg"))))
    assert plate is not None
    assert plate.chart.marks == ()
    assert "Another protocol: 60 rounds instead of 100." in plate.caption
    assert "Diamonds" not in plate.caption


def test_figure_4_compares_at_equal_time() -> None:
    slow = result("fedper", accuracies={20: 0.6, 100: 0.99})
    quick = result("fedlps", accuracies={50: 0.9, 100: 0.95})
    for record in quick["rounds"]:
        record["cost"]["simulated_seconds"] /= 4
    plate = accuracy_against_time(_comparison(quick, slow))
    assert plate is not None
    assert (plate.number, plate.chart.unit, plate.chart.marks) == ("Figure 4", "seconds", ())
    assert plate.chart.series[0].x == (50 * SECONDS / 4, 100 * SECONDS / 4)
    assert "fedlps has 95.0%, the best rival by then, fedper, 60.0%; at the end of its run fedper has 99.0%" in plate.caption


def test_without_a_rival_or_without_a_curve_there_is_no_figure() -> None:
    assert accuracy_against_flops(_comparison(result("fedlps"), result("flst"))) is None
    assert accuracy_against_flops(_comparison(result("fedavg"), result("local"))) is None
    once = (result(name, accuracies={100: 0.5}) for name in ("fedlps", "fedavg"))
    assert accuracy_against_time(_comparison(*once)) is None


def test_of_many_methods_six_and_the_front_have_colours_of_their_own() -> None:
    made = []
    for place in range(12):
        made.append(result("fedlps" if place == 3 else f"method-{place}", accuracies={50: 0.1, 100: 0.5 + place / 100}))
        made[-1]["cost"]["flops_compact"] = 1e9 * (place + 1) if place > 8 else 1e10
    plate = accuracy_against_flops(_comparison(*made))
    assert plate is not None
    clear = [one for one in plate.chart.series if not one.faint]
    assert len(plate.chart.series) == 12
    assert len(clear) == 6
    assert {"fedlps", "method-11"} <= {one.method for one in clear}
    assert sorted(one.place for one in clear) == list(range(6)), "no colour twice"
