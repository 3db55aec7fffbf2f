"""The Markdown table: one line per method, the published numbers beside, and what labels mean below."""

from __future__ import annotations

from typing import Any

from saved_results import result

from sparsekit_fl.paper.published import published_beside
from sparsekit_fl.paper.tables import page_of
from sparsekit_fl.report.comparison import Comparison
from sparsekit_fl.report.text import markdown_table
from sparsekit_fl.report.trials import Trial, sections_of


def _table(*results: dict[str, Any]) -> list[list[str]]:
    (section,) = sections_of(map(Trial.of, results))
    comparison = Comparison(section)
    lines = markdown_table(comparison, page_of(published_beside(comparison))).splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]


def test_each_method_has_a_line_with_the_published_numbers_last() -> None:
    head, rule, *rows = _table(result("fedavg", 0), result("fedavg", 1), result("mine"))
    assert head[-2:] == ["published accuracy, %", "published FLOPs"]
    assert {len(line) for line in (head, rule, *rows)} == {len(head)}
    lines = {row[0]: row for row in rows}
    assert lines["fedavg"][-2:] == ["88.15 ± 1.14", "2.8T"]
    assert lines["fedavg"][1] == "75.0 ± 0.0%"
    assert lines["mine"][-2:] == ["–", "–"]


def test_other_levels_of_heterogeneity_were_not_published_in_it() -> None:
    _head, _, *rows = _table(result("fedavg"), result("fedavg", heterogeneity="low"))
    assert sorted(row[-1] for row in rows) == ["2.8T", "–"]


def test_without_published_rows_there_are_no_such_columns() -> None:
    head, *_ = _table(result("mine"))
    assert "published FLOPs" not in head


def test_notes_stand_below_and_a_bar_in_a_name_does_not_break_the_table() -> None:
    (section,) = sections_of([Trial.of(result("a|b", note="Saves bytes alone."))])
    text = markdown_table(Comparison(section))
    assert "| a\\|b (1) |" in text
    assert text.endswith("\n- (1) Saves bytes alone.\n")
    assert text.startswith("**cnn on mnist, 100 clients, 100 rounds; ")
