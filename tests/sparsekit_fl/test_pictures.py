"""The picture of a comparison: its points, and that it is drawn twice to the same bytes."""

from typing import Any

import pytest
from saved_results import FLOPS, SECONDS, compared, result

from sparsekit_fl.pictures import curves_of, to_svg

pytest.importorskip("matplotlib", reason="matplotlib is not installed; pip install 'sparsekit-torch[report]'")


def points(axes: Any, series: str) -> list[tuple[Any, ...]]:
    lines = [line for line in axes.lines if line.get_label() == series]
    return [pair for line in lines for pair in zip(line.get_xdata(orig=True), line.get_ydata(orig=True), strict=True)]


def test_curves_are_means_over_the_rounds_in_which_all_seeds_were_scored() -> None:
    rounds, flops, seconds = curves_of(compared(
        result("a", accuracies={20: 0.1, 50: 0.5, 100: 0.75}), result("a", 1, accuracies={50: 0.7, 100: 0.85}), result("b"),
        result("once", accuracies={100: 0.5}),
    )).axes  # fmt: skip
    assert points(rounds, "a") == [(50, pytest.approx(0.6)), (100, pytest.approx(0.8))]
    assert points(flops, "a")[0] == (50 * FLOPS, pytest.approx(0.6))
    assert points(seconds, "b") == [(50 * SECONDS, 0.5), (100 * SECONDS, 0.75)]
    assert points(rounds, "once") == [], "one point is not a line"
    apart = curves_of(compared(result("a", accuracies={20: 0.5}), result("a", 1, accuracies={30: 0.5}), result("b")))
    assert points(apart.axes[0], "a") == []
    assert curves_of(compared(result("a", accuracies={100: 0.5}))) is None


def test_problems_without_accuracy_show_their_own_metric() -> None:
    made = result("a")
    made["final"]["personal"] = {"loss": 0.9, "rmse": 0.3}
    for record in filter(lambda one: one["evaluation"], made["rounds"]):
        record["evaluation"] = {"personal": {"loss": 0.5, "rmse": 0.4}}
    figure = curves_of(compared(made))
    assert figure.get_suptitle() == "Rmse on the clients' own test data"
    assert points(figure.axes[0], "a") == [(50, 0.4), (100, 0.4)]


def test_a_picture_is_drawn_twice_to_the_same_bytes() -> None:
    first, second = (to_svg(curves_of(compared(*(result(f"m{number}") for number in range(9))))) for _ in range(2))
    assert first == second
    assert b"</svg>" in first
