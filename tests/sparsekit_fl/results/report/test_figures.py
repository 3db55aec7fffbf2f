"""Figures: which there are, their points, and the pictures."""

from typing import Any

import pytest
from saved_results import FLOPS, SECONDS, compared, result

from sparsekit_fl.results.report.figures import figures_of
from sparsekit_fl.results.report.plots import Figure


def figures(*results: dict[str, Any]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures_of(compared(*results))}


def points(figure: Figure, series: str) -> list[tuple[Any, ...]]:
    own = figure.points[figure.points["series"] == series]
    return [tuple(one) for one in own[["x", "y"]].itertuples(index=False)]


def test_curves_are_means_over_the_rounds_in_which_all_seeds_were_scored() -> None:
    made = figures(
        result("a", accuracies={20: 0.1, 50: 0.5, 100: 0.75}), result("a", 1, accuracies={50: 0.7, 100: 0.85}), result("b")
    )
    curves = ["accuracy-flops", "accuracy-time", "accuracy-rounds"]
    assert list(made) == ["front", *curves, "bars-accuracy", "bars-flops", "bars-time"]
    assert points(made["accuracy-flops"], "a") == [(50 * FLOPS, pytest.approx(0.6)), (100 * FLOPS, pytest.approx(0.8))]
    assert sorted(made["accuracy-flops"].points["deviation"]) == pytest.approx([0.0, 0.0, 0.005**0.5, 0.02**0.5])
    assert points(made["accuracy-time"], "b") == [(50 * SECONDS, 0.5), (100 * SECONDS, 0.75)]
    assert [x for x, _ in points(made["accuracy-rounds"], "a")] == [50, 100]
    apart = figures(result("a", accuracies={20: 0.5}), result("a", 1, accuracies={30: 0.5}), result("b"))
    assert points(apart["accuracy-rounds"], "a") == []
    assert list(figures(result("a", accuracies={100: 0.5}))) == ["bars-accuracy", "bars-flops", "bars-time"]


def test_bars_are_sorted_the_best_above_and_what_never_reached_the_target_last() -> None:
    made = figures(*(result(name, accuracies={100: best}) for name, best in (("a", 0.1), ("b", 0.9), ("c", 0.7))))
    assert made["bars-accuracy"].points["series"].to_list() == ["b", "c", "a"]
    assert made["bars-time"].title == "Simulated time to 81% accuracy"
    assert made["bars-time"].points["y"].isna().to_list() == [False, True, True]
    assert made["bars-accuracy"].marks["y"].to_list() == [0.25] * 3


def test_other_metrics_the_global_model_and_the_worst_tenth_have_curves() -> None:
    made = result("a")
    made["final"]["personal"]["rmse"] = 0.3
    for record in made["rounds"]:
        if record["evaluation"]:
            record["evaluation"] = {"personal": {"accuracy": 0.5, "rmse": 0.4}, "global": {"accuracy": 0.2},
                                    "worst_decile": {"personal": {"accuracy": 0.1, "rmse": 0.8}}}  # fmt: skip
    names = {"accuracy-global-rounds", "accuracy-worst_decile-rounds", "rmse-rounds", "rmse-worst_decile-rounds"}
    found = figures(made)
    assert names <= set(found)
    assert points(found["rmse-worst_decile-rounds"], "a") == [(50, 0.8), (100, 0.8)]
    assert found["rmse-rounds"].y_unit == "number"
