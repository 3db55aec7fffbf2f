"""Pictures: which there are, their points, and that they are drawn twice to the same bytes."""

from typing import Any

import pytest
from saved_results import FLOPS, SECONDS, compared, result

from sparsekit_fl.pictures import pictures_of, to_svg

pytest.importorskip("matplotlib", reason="matplotlib is not installed; pip install 'sparsekit-torch[report]'")


def pictures(*results: dict[str, Any]) -> dict[str, Any]:
    return {title: figure.axes for title, figure in pictures_of(compared(*results)).items()}


def points(axes: Any, series: str) -> list[tuple[Any, ...]]:
    lines = [line for line in axes.lines if line.get_label() == series]
    return [pair for line in lines for pair in zip(line.get_xdata(orig=True), line.get_ydata(orig=True), strict=True)]


CURVES = "Accuracy on the clients' own test data"


def test_curves_are_means_over_the_rounds_in_which_all_seeds_were_scored() -> None:
    made = pictures(
        result("a", accuracies={20: 0.1, 50: 0.5, 100: 0.75}), result("a", 1, accuracies={50: 0.7, 100: 0.85}), result("b"),
        result("once", accuracies={100: 0.5}),
    )  # fmt: skip
    assert list(made) == [CURVES]
    rounds, flops, seconds, _ = made[CURVES]
    assert points(rounds, "a") == [(50, pytest.approx(0.6)), (100, pytest.approx(0.8))]
    assert points(flops, "a")[0] == (50 * FLOPS, pytest.approx(0.6))
    assert points(seconds, "b") == [(50 * SECONDS, 0.5), (100 * SECONDS, 0.75)]
    assert points(rounds, "once") == [], "one point is not a line"
    apart = pictures(result("a", accuracies={20: 0.5}), result("a", 1, accuracies={30: 0.5}), result("b"))
    assert points(apart[CURVES][0], "a") == []
    assert pictures(result("a", accuracies={100: 0.5})) == {}


def test_published_accuracies_stand_at_their_flops_where_runs_have_the_protocol_of_the_paper() -> None:
    axes = pictures(result("fedlps", flops_paper=0.8e12), result("fedavg"), result("flst"))[CURVES][3]
    assert points(axes, "fedlps") == [(pytest.approx(0.4e12), 0.5), (pytest.approx(0.8e12), 0.75)]
    marks = dict(tuple(one) for container in axes.containers for one in container[0].get_xydata())
    assert (marks[2.8e12], marks[0.8e12]) == (pytest.approx(0.8815), pytest.approx(0.9677))
    assert len(pictures(result("fedlps", rounds=60), result("fedavg", rounds=60))[CURVES]) == 3


def test_clients_have_a_box_and_problems_without_accuracy_their_own_metric() -> None:
    made = result("a")
    made["final"]["personal"] = {"loss": 0.9, "rmse": 0.3}
    made["final"]["per_client"] = [{"metrics": {"personal": {"rmse": value}}} for value in (0.1, 0.5, None)]
    for record in made["rounds"]:
        if record["evaluation"]:
            record["evaluation"] = {"personal": {"loss": 0.5, "rmse": 0.4}}
    found = pictures(made)
    (box,) = found["Final rmse of each client"]
    assert [label.get_text() for label in box.get_yticklabels()] == ["a"]
    assert {0.1, 0.5} <= {float(x) for line in box.lines for x in line.get_xdata()}
    assert points(found["Rmse on the clients' own test data"][0], "a") == [(50, 0.4), (100, 0.4)]


def test_every_picture_is_drawn_twice_to_the_same_bytes() -> None:
    many = [result(f"m{number}") for number in range(9)]
    for made in many:
        made["final"]["per_client"] = [{"metrics": {"personal": {"accuracy": share}}} for share in (0.1, 0.5)]
    first, second = pictures_of(compared(*many)), pictures_of(compared(*many))
    assert len(first) == 2
    for title, figure in first.items():
        drawn = to_svg(figure)
        assert drawn == to_svg(second[title])
        assert b"</svg>" in drawn
