"""The table of a comparison: means, deviations, time to a target, footnotes, and how it fits a terminal."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from rich.console import Console
from saved_results import SECONDS, result

from sparsekit.errors import InvalidValueError
from sparsekit_fl.report.comparison import Comparison, check_target
from sparsekit_fl.report.table import seconds_to
from sparsekit_fl.report.trials import Trial, sections_of


def _compare(*results: dict[str, Any], target: float | None = None, failed: tuple[Trial, ...] = ()) -> Comparison:
    (section,) = sections_of([*map(Trial.of, results), *failed])
    return Comparison(section, target)


def _shown(comparison: Comparison, width: int) -> str:
    text = io.StringIO()
    comparison.show(Console(file=text, width=width))
    return text.getvalue()


def test_means_and_deviations_are_over_seeds() -> None:
    comparison = _compare(
        result("a", 0, accuracies={100: 0.5}, shared=None), result("a", 1, accuracies={100: 0.7}), result("b", 0)
    )
    a, b = comparison.rows
    assert (a.label, b.label) == ("a", "b")
    found = a.numbers["personal_accuracy"]
    assert (found.mean, found.count, found.of) == (pytest.approx(0.6), 2, 2)
    assert found.deviation == pytest.approx(0.02**0.5)
    assert (a.numbers["global_accuracy"].mean, a.numbers["global_accuracy"].count) == (0.25, 1)
    assert b.numbers["personal_accuracy"].deviation is None
    assert b.numbers["flops_compact"].mean == 100e9
    assert comparison.seeds_text() == "mean ± sample deviation over 2 seeds"


def test_time_to_a_target_is_that_of_the_first_scored_round_that_reached_it() -> None:
    one = result("a", accuracies={10: 0.4, 20: 0.6, 30: 0.5, 100: 0.9})
    assert seconds_to(one, 0.6) == 20 * SECONDS
    assert seconds_to(one, 0.61) == 100 * SECONDS
    assert seconds_to(one, 0.95) is None
    comparison = _compare(one, result("a", 1, accuracies={100: 0.3}), target=0.6)
    reached = comparison.rows[0].numbers["target_seconds"]
    assert (reached.mean, reached.count, reached.of) == (10.0, 1, 2)
    assert "time to 60%" in _shown(comparison, 200)
    assert "10.0 s (1 of 2)" in _shown(comparison, 200)


def test_without_a_target_it_is_nine_tenths_of_the_best() -> None:
    assert _compare(result("a", accuracies={100: 0.987}), result("b", accuracies={100: 0.5})).goal == 0.88
    assert _compare(result("a", accuracies={100: 0.0})).goal == 0.0


@pytest.mark.parametrize("target", [0.0, -1.0, 1.5, float("nan")])
def test_a_target_that_is_no_accuracy_is_refused(target: float) -> None:
    with pytest.raises(InvalidValueError, match=r"must be an accuracy in \(0, 1\]"):
        check_target(target)


def test_equal_notes_are_one_footnote() -> None:
    comparison = _compare(
        result("a", note="Saves bytes."), result("b"), result("c", note="Saves bytes."), result("d", note="X.")
    )
    assert comparison.notes == ("Saves bytes.", "X.")
    assert [row.notes for row in comparison.rows] == [(1,), (), (1,), (2,)]
    text = _shown(comparison, 200)
    assert "a ¹" in text
    assert "d ²" in text
    assert "¹ Saves bytes." in text
    assert comparison.to_dict()["notes"] == {"a": ["Saves bytes."], "c": ["Saves bytes."], "d": ["X."]}


def test_levels_are_rows_with_a_label() -> None:
    comparison = _compare(result("a", heterogeneity="high"), result("b", heterogeneity="low"), result("a", heterogeneity="low"))
    assert [row.label for row in comparison.rows] == [
        "a, heterogeneity low", "b, heterogeneity low", "a, heterogeneity high"
    ]  # fmt: skip
    lacking = _compare(result("a", lack_classes=2), result("a", lack_classes=8))
    assert [row.label for row in lacking.rows] == ["a, lacks 2", "a, lacks 8"]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(width: int) -> None:
    comparison = _compare(*(result("fedlps-magnitude", seed, accuracies={100: 0.9 + seed / 100}) for seed in range(3)))
    text = _shown(comparison, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for shown in ("91.0 ± 1.0%", "100.0 ± 0.0 MB", "2.79 ± 0.00T", "50.0 ± 0.0 s", "wall time"):
        assert shown in text


def test_failures_stand_below_the_table() -> None:
    failed = Trial(method="b", seed=4, config=result("b")["config"], error="[red] it broke")
    comparison = _compare(result("a"), failed=(failed,))
    assert "failed: b, seed 4: [red] it broke" in _shown(comparison, 80)
    (entry,) = comparison.to_dict()["failed"]
    assert (entry["method"], entry["seed"], entry["error"]) == ("b", 4, "[red] it broke")


def test_csv_has_a_line_for_every_run_with_its_level() -> None:
    comparison = _compare(result("a", lack_classes=2), result("a", 1, lack_classes=2))
    rows = list(csv.DictReader(io.StringIO(comparison.to_csv())))
    assert [(row["method"], row["seed"], row["heterogeneity"], row["lack_classes"]) for row in rows] == [
        ("a", "0", "high", "2"), ("a", "1", "high", "2")
    ]  # fmt: skip
    assert float(rows[0]["personal_accuracy"]) == 0.75
    assert float(rows[0]["target_seconds"]) == 50.0
