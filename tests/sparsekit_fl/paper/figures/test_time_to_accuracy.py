"""Figure 5: the paper's target, its seconds as rings, and who never gets there."""

from __future__ import annotations

from typing import Any

from saved_results import SECONDS, result

from sparsekit_fl.paper.figures.time_to_accuracy import time_to_accuracy
from sparsekit_fl.report.comparison import Comparison
from sparsekit_fl.report.trials import Trial, sections_of


def _comparison(*results: dict[str, Any], target: float | None = None) -> Comparison:
    (section,) = sections_of(map(Trial.of, results))
    return Comparison(section, target)


def _made(**more: Any) -> list[dict[str, Any]]:
    return [
        result("fedlps", accuracies={20: 0.71, 100: 0.8}, **more),
        result("fedavg", accuracies={20: 0.2, 80: 0.72, 100: 0.9}, **more),
        result("cs", accuracies={20: 0.2, 100: 0.3}, **more),
    ]


def test_cifar_10_has_the_papers_target_and_its_seconds_beside() -> None:
    plate = time_to_accuracy(_comparison(*_made(dataset="cifar10", clients=50)))
    assert plate is not None
    bars = {one.label or one.method: (one.y, one.second) for one in plate.chart.series}
    assert bars == {
        "fedlps": ((20 * SECONDS,), 90.74),
        "fedavg": ((80 * SECONDS,), None),
        "best baseline, published": ((), 290.83),
        "cs": ((), None),
    }
    assert next(iter(bars)) == "fedlps", "the fastest stands above"
    assert plate.chart.title == "Figure 5: simulated time to 70% accuracy"
    assert "75 % less than the fastest rival, fedavg, with 40.0 s; 1 of its rivals do not reach it" in plate.caption


def test_another_target_has_no_published_seconds() -> None:
    plate = time_to_accuracy(_comparison(*_made(dataset="cifar10", clients=50), target=0.8))
    assert plate is not None
    assert [one.second for one in plate.chart.series] == [None] * 3
    assert "ring" not in plate.chart.x


def test_a_seed_that_does_not_reach_it_takes_the_bar() -> None:
    lucky, unlucky = result("fedlps", accuracies={20: 0.95}), result("fedlps", 1, accuracies={20: 0.5})
    plate = time_to_accuracy(_comparison(lucky, unlucky, result("fedavg", accuracies={60: 0.95}), target=0.9))
    assert plate is not None
    assert {one.method: one.y for one in plate.chart.series} == {"fedavg": (60 * SECONDS,), "fedlps": ()}
    assert "fedlps does not reach it with every seed; fedavg does" in plate.caption


def test_a_target_that_nobody_reaches_makes_no_figure() -> None:
    assert time_to_accuracy(_comparison(*_made(), target=0.99)) is None
