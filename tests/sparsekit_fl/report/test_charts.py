"""Charts: which there are, what is in them, and that they can be drawn."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from saved_results import FLOPS, SECONDS, result

from sparsekit_fl.report.charts import Chart, charts_of, on_front
from sparsekit_fl.report.comparison import Comparison
from sparsekit_fl.report.drawing import draw_chart, inline_svg, series_style
from sparsekit_fl.report.trials import Trial, sections_of


def _charts(*results: dict[str, Any]) -> dict[str, Chart]:
    (section,) = sections_of(map(Trial.of, results))
    return {chart.name: chart for chart in charts_of(Comparison(section))}


def test_curves_bars_and_no_levels_for_one_level() -> None:
    charts = _charts(result("a"), result("a", 1, accuracies={50: 0.7, 100: 0.85}), result("b"))
    curves = ["accuracy-flops", "accuracy-time", "accuracy-rounds"]
    assert list(charts) == ["front", *curves, "bars-accuracy", "bars-flops", "bars-time"]
    a, b = charts["accuracy-flops"].series
    assert (a.method, a.place, b.method, b.place) == ("a", 0, "b", 1)
    assert a.x == (50 * FLOPS, 100 * FLOPS)
    assert a.y == pytest.approx((0.6, 0.8))
    assert a.deviation == pytest.approx((0.02**0.5, 0.005**0.5))
    assert charts["accuracy-time"].series[0].x == (50 * SECONDS, 100 * SECONDS)
    assert charts["accuracy-rounds"].series[0].x == (50, 100)
    bar = charts["bars-accuracy"].series[1]
    assert (bar.method, bar.y, bar.deviation, bar.second) == ("b", (0.75,), (0.0,), 0.25)
    assert charts["bars-flops"].series[0].second == pytest.approx(2.788128e12)
    assert charts["bars-time"].title == "Simulated time to 72% accuracy"


def test_a_run_that_was_scored_once_has_no_curve() -> None:
    assert list(_charts(result("a", accuracies={100: 0.5}))) == ["bars-accuracy", "bars-flops", "bars-time"]


def test_a_method_that_never_reached_the_target_keeps_its_place_without_a_bar() -> None:
    charts = _charts(result("a", accuracies={100: 0.9}), result("b", accuracies={100: 0.1}))
    assert [one.y for one in charts["bars-time"].series] == [(50.0,), ()]


def test_accuracy_and_time_against_the_heterogeneity_of_devices() -> None:
    charts = _charts(
        *(result("a", heterogeneity=level, accuracies={100: value}) for level, value in (("high", 0.85), ("low", 0.9))),
        result("b", heterogeneity="low"),
    )
    assert list(charts)[:3] == ["accuracy-heterogeneity", "time-heterogeneity", "target-time-heterogeneity"]
    a, b = charts["accuracy-heterogeneity"].series
    assert (a.x, a.y) == (("low", "high"), (0.9, 0.85))
    assert b.x == ("low",)
    assert charts["time-heterogeneity"].series[0].y == (50.0, 50.0)
    assert charts["bars-accuracy-heterogeneity-low"].title == "Accuracy per method (heterogeneity low)"


def test_accuracy_against_the_classes_that_clients_lack() -> None:
    charts = _charts(*(result("a", lack_classes=lack, accuracies={50: 0.1, 100: 0.9 - lack / 50}) for lack in (8, 2, 4)))
    (series,) = charts["accuracy-classes"].series
    assert series.x == ("2", "4", "8")
    assert series.y == pytest.approx((0.86, 0.82, 0.74))
    assert "accuracy-flops-lacks-8" in charts


def test_both_levels_at_once_give_a_chart_for_each_value_of_the_other() -> None:
    charts = _charts(*(result("a", heterogeneity=h, lack_classes=lack) for h in ("low", "median") for lack in (2, 8)))
    names = [name for name in charts if "heterogeneity" in name and "bars" not in name and "accuracy-" in name]
    assert {"accuracy-heterogeneity-lacks-2", "accuracy-heterogeneity-lacks-8"} <= set(names)
    assert {"accuracy-classes-low", "accuracy-classes-median"} <= set(charts)


def test_thirty_two_methods_can_be_told_apart() -> None:
    assert len({series_style(place)[:2] for place in range(32)}) == 32


@pytest.mark.slow
def test_every_kind_is_drawn_as_a_picture_and_equal_charts_give_equal_bytes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    charts = _charts(*(result(name, heterogeneity=level) for name in ("a", "b<&") for level in ("low", "high")))
    kinds = {chart.kind: chart for chart in charts.values()}
    assert set(kinds) == {"curve", "level", "bar", "front"}
    for kind, chart in kinds.items():
        draw_chart(chart, tmp_path / f"{kind}.png")
        draw_chart(chart, tmp_path / f"{kind}.svg")
        draw_chart(chart, tmp_path / f"{kind}-again.svg")
        assert (tmp_path / f"{kind}.png").read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / f"{kind}.svg").read_bytes() == (tmp_path / f"{kind}-again.svg").read_bytes()


def test_the_svg_of_a_page_is_small_has_its_methods_and_no_colours_or_ids_that_clash() -> None:
    pytest.importorskip("matplotlib")
    chart = _charts(result("a"), result("b<&"))["accuracy-flops"]
    svg = inline_svg(chart, prefix="c1-")
    root = ElementTree.fromstring(svg)
    marked = [element.get("data-method") for element in root.iter() if element.get("data-method")]
    assert set(marked) == {"a", "b<&"}
    ids = [found for element in root.iter() if (found := element.get("id"))]
    assert ids
    assert all(name.startswith("c1-") for name in ids)
    assert set(re.findall(r"url\(#([^)]+)\)", svg)) <= set(ids)
    assert root.get("width") is None
    assert root.get("aria-label") == "Accuracy against FLOPs"
    assert "#333333" not in svg.lower()
    assert "var(--ink)" in svg
    assert len(svg) < 40_000
    assert svg == inline_svg(chart, prefix="c1-")


def test_bars_are_sorted_the_best_above() -> None:
    charts = _charts(result("a", accuracies={100: 0.5}), result("b", accuracies={100: 0.9}), result("c", accuracies={100: 0.7}))
    assert [one.method for one in charts["bars-accuracy"].series] == ["b", "c", "a"]


def test_the_front_holds_what_no_other_method_beats_in_both_numbers() -> None:
    cheap, good, beaten = result("cheap", accuracies={100: 0.7}), result("good"), result("beaten")
    for made, flops, accuracy in ((cheap, 1e9, 0.7), (good, 4e9, 0.9), (beaten, 5e9, 0.8)):
        made["cost"]["flops_compact"] = flops
        made["final"]["personal"]["accuracy"] = accuracy
    front = _charts(cheap, good, beaten)["front"]
    assert [one.method for one in front.series] == ["cheap", "good", "beaten"]
    assert [one.method for one in on_front(front.series)] == ["cheap", "good"]


def test_the_subject_is_fedlps_or_the_first_and_told_from_the_rest() -> None:
    for methods, subject in ((("a", "fedlps"), "fedlps"), (("a", "b"), "a")):
        charts = _charts(*(result(name) for name in methods))
        for name in ("front", "accuracy-flops", "bars-accuracy"):
            assert [one.method for one in charts[name].series if one.subject] == [subject]


def test_rounds_stand_on_an_integer_axis(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    chart = _charts(result("a", rounds=3, accuracies={1: 0.2, 2: 0.4, 3: 0.6}))["accuracy-rounds"]
    svg = inline_svg(chart, prefix="r-")
    ticks = set(re.findall(r">([\d.]+)</text>", svg))
    assert {"1", "2", "3"} <= ticks
    assert not {tick for tick in ticks if "." in tick}
