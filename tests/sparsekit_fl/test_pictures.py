"""Pictures: which there are, their points, and that they are drawn twice to the same bytes."""

import io
from typing import Any

import pytest
from saved_results import FLOPS, SECONDS, compared, result

from sparsekit_fl.pictures import Panel, Picture, draw, pictures_of


def pictures(*results: dict[str, Any]) -> dict[str, Picture]:
    return {picture.title: picture for picture in pictures_of(compared(*results))}


def points(panel: Panel, series: str, *columns: str) -> list[tuple[Any, ...]]:
    own = panel.points[panel.points["series"] == series]
    return [tuple(one) for one in own[list(columns or ("x", "y"))].itertuples(index=False)]


CURVES = "Accuracy on the clients' own test data"


def test_curves_are_means_over_the_rounds_in_which_all_seeds_were_scored() -> None:
    made = pictures(
        result("a", accuracies={20: 0.1, 50: 0.5, 100: 0.75}), result("a", 1, accuracies={50: 0.7, 100: 0.85}), result("b"),
        result("once", accuracies={100: 0.5}),
    )  # fmt: skip
    assert list(made) == [CURVES]
    rounds, flops, seconds, paper = made[CURVES].panels
    assert points(rounds, "a") == [(50, pytest.approx(0.6)), (100, pytest.approx(0.8))]
    assert points(flops, "a")[0] == (50 * FLOPS, pytest.approx(0.6))
    assert points(seconds, "b") == [(50 * SECONDS, 0.5), (100 * SECONDS, 0.75)]
    assert sorted(rounds.points["deviation"]) == pytest.approx([0.0, 0.0, 0.005**0.5, 0.02**0.5])
    assert points(rounds, "once") == [], "one point is not a line"
    apart = pictures(result("a", accuracies={20: 0.5}), result("a", 1, accuracies={30: 0.5}), result("b"))
    assert points(apart[CURVES].panels[0], "a") == []
    assert pictures(result("a", accuracies={100: 0.5})) == {}
    assert paper.marks.empty, "the paper has no method a"


def test_published_accuracies_stand_at_their_flops_where_runs_have_the_protocol_of_the_paper() -> None:
    made = pictures(result("fedlps", flops_paper=0.8e12), result("fedavg"), result("flst"))[CURVES].panels[3]
    assert points(made, "fedlps") == [(pytest.approx(0.4e12), 0.5), (pytest.approx(0.8e12), 0.75)]
    marks = {one.series: (one.x, one.y) for one in made.marks.itertuples()}
    assert marks["fedavg"] == (2.8e12, pytest.approx(0.8815))
    assert marks["fedlps"] == (0.8e12, pytest.approx(0.9677))
    assert len(pictures(result("fedlps", rounds=60), result("fedavg", rounds=60))[CURVES].panels) == 3


def test_levels_are_in_order_with_one_picture_for_each_value_of_the_other_axis() -> None:
    made = pictures(*(result(name, heterogeneity=level, lack_classes=lack) for name in ("a", "b")
                      for level in ("high", "low", "median") for lack in (8, 2)))  # fmt: skip
    title = "Accuracy and time against heterogeneity of the devices (lacks 8)"
    assert {title, "Accuracy and time against classes that every client lacks (heterogeneity low)"} <= set(made)
    accuracy, time = made[title].panels
    assert points(accuracy, "a") == [("low", 0.75), ("median", 0.75), ("high", 0.75)]
    assert (accuracy.y_unit, time.y_unit) == ("share", "seconds")


def test_a_number_that_is_an_option_of_methods_is_an_axis() -> None:
    made = pictures(*(result(f"{name}[ratio={ratio}]", accuracies={100: ratio}) for name in ("flst", "fedlps-random")
                      for ratio in (0.8, 0.2)), result("single[ratio=0.5]"))  # fmt: skip
    accuracy, _ = made["Accuracy and time against ratio"].panels
    assert points(accuracy, "flst") == [(0.2, 0.2), (0.8, 0.8)]
    assert points(accuracy, "single") == []


def test_clients_have_a_box_and_problems_without_accuracy_their_own_metric() -> None:
    made = result("a")
    made["final"]["personal"] = {"loss": 0.9, "rmse": 0.3}
    made["final"]["per_client"] = [{"metrics": {"personal": {"rmse": value}}} for value in (0.1, 0.5, None)]
    for record in made["rounds"]:
        if record["evaluation"]:
            record["evaluation"] = {"personal": {"loss": 0.5, "rmse": 0.4}}
    found = pictures(made)
    assert points(found["Final rmse of each client"].panels[0], "a", "y") == [(0.1,), (0.5,)]
    curve = found["Rmse on the clients' own test data"].panels[0]
    assert (points(curve, "a"), curve.y_unit) == ([(50, 0.4), (100, 0.4)], "number")


def test_ratios_are_means_by_capability_over_tenths_of_the_run() -> None:
    made = result("fedlps", rounds=20, accuracies={10: 0.5, 20: 0.6})
    for record in made["rounds"]:
        record["ratios"] = {"0": 0.5 if record["round"] % 2 else 0.75, "1": 0.25, "2": 0.25}
        record["capabilities"] = {"0": 1.0, "1": 0.25, "2": 1.0, "3": 0.5}
    (panel,) = pictures(made, result("fedavg", rounds=20))["Ratios of fedlps, by capability"].panels
    assert points(panel, "devices of 1") == [(x, pytest.approx(0.4375)) for x in range(2, 21, 2)]
    assert points(panel, "devices of 1/4") == [(x, 0.25) for x in range(2, 21, 2)]


def test_every_picture_is_drawn_twice_to_the_same_bytes() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; pip install 'sparsekit-torch[report]'")
    many = [result(f"m{number}", heterogeneity=level) for number in range(9) for level in ("low", "high")]
    for made in many:
        made["final"]["per_client"] = [{"metrics": {"personal": {"accuracy": share}}} for share in (0.1, 0.5)]
    for picture in pictures_of(compared(*many)):
        first, second = io.BytesIO(), io.BytesIO()
        draw(picture, first)
        draw(picture, second)
        assert first.getvalue() == second.getvalue()
        assert b"</svg>" in first.getvalue()
