"""FLOPs and times of reports contain the passes by which methods decide; training alone stands beside, with what is lacking."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from saved_results import FLOPS, SECONDS, result, save

from sparsekit_fl.paper.published import published_beside
from sparsekit_fl.paper.tables import page_of
from sparsekit_fl.report.charts import charts_of
from sparsekit_fl.report.comparison import Comparison
from sparsekit_fl.report.drawing import draw_chart
from sparsekit_fl.report.table import COLUMNS, result_table
from sparsekit_fl.report.text import latex_table, markdown_table
from sparsekit_fl.report.trials import Trial, sections_of
from sparsekit_fl.report.write import read_comparisons, write_report
from sparsekit_fl.results.scoring import FLOPS_LACK, SECONDS_LACK

SCORING = 10**8
"""FLOPs of scoring in one round, a tenth of those of training."""


def scoring(method: str, *, schema: int = 3, **options: Any) -> dict[str, Any]:
    """A result of a method that scores while it trains, as this version writes it, or as schema 2 did."""
    made = {**result(method, **options), "schema": schema}
    costs = [(made["cost"], made["config"]["rounds"]), *((record["cost"], record["round"]) for record in made["rounds"])]
    for cost, round in costs:
        cost["flops_scoring"] = SCORING * round
        if schema > 2:
            cost |= {"flops_compact_training": cost["flops_compact"], "simulated_seconds_training": cost["simulated_seconds"]}
            cost |= {"simulated_seconds_scoring": 0.1 * round}
            cost["flops_compact"] += SCORING * round
            cost["simulated_seconds"] += 0.1 * round
    return made


def compared(*results: dict[str, Any]) -> Comparison:
    (section,) = sections_of(map(Trial.of, results))
    return Comparison(section)


def test_totals_contain_scoring_and_training_alone_stands_beside() -> None:
    comparison = compared(scoring("fedlps"), result("fedavg"))
    own, plain = (row.numbers for row in comparison.rows)
    assert own["flops_compact"].mean == 100 * (FLOPS + SCORING)
    assert own["flops_compact_training"].mean == 100 * FLOPS
    assert own["simulated_seconds"].mean == pytest.approx(100 * (SECONDS + 0.1))
    assert own["simulated_seconds_training"].mean == 100 * SECONDS
    assert plain["flops_compact"].mean == plain["flops_compact_training"].mean == 100 * FLOPS
    names = [column.name for column in comparison.columns]
    assert names[names.index("flops_compact") + 1] == "flops_compact_training"
    assert names[names.index("simulated_seconds") + 1] == "simulated_seconds_training"


def test_without_a_method_that_scores_there_are_no_such_columns() -> None:
    comparison = compared(result("fedavg"), result("heterofl"))
    assert not [column.name for column in comparison.columns if "training" in column.name]
    assert comparison.notes == ()


def test_scoring_that_a_file_has_apart_is_added_and_the_row_says_what_its_times_lack() -> None:
    comparison = compared(scoring("fedlps", schema=2), result("fedavg"))
    (own, plain) = comparison.rows
    assert own.numbers["flops_compact"].mean == 100 * (FLOPS + SCORING)
    assert own.numbers["simulated_seconds"].mean == 100 * SECONDS
    assert (own.notes, plain.notes, comparison.notes) == ((1,), (), (SECONDS_LACK,))
    assert [column.name for column in comparison.columns if "training" in column.name] == ["flops_compact_training"]


def test_rows_of_version_0_1_say_that_scoring_is_not_in_them() -> None:
    old = {**result("fedlps", note="Its own note."), "policies": {"personal": "OwnModel(select='best')"}}
    comparison = compared(old, {**result("fedavg"), "policies": {"personal": "GlobalModel()"}})
    assert comparison.notes == ("Its own note.", FLOPS_LACK)
    assert [row.notes for row in comparison.rows] == [(1, 2), ()]
    assert comparison.to_dict()["notes"] == {"fedlps": ["Its own note.", FLOPS_LACK]}
    assert FLOPS_LACK in markdown_table(comparison)
    assert FLOPS_LACK.partition(":")[0] in latex_table(comparison)


def test_charts_are_drawn_against_totals() -> None:
    comparison = compared(scoring("fedlps"), result("fedavg"))
    charts = {chart.name: chart for chart in charts_of(comparison)}
    front = {one.method: one.x for one in charts["front"].series}
    assert front == {"fedlps": (100 * (FLOPS + SCORING),), "fedavg": (100 * FLOPS,)}
    curves = {one.method: one.x for one in charts["accuracy-flops"].series}
    assert curves["fedlps"] == (50 * (FLOPS + SCORING), 100 * (FLOPS + SCORING))
    times = {one.method: one.x[-1] for one in charts["accuracy-time"].series}
    assert times["fedlps"] == pytest.approx(100 * (SECONDS + 0.1))


def test_published_flops_are_compared_with_training_alone() -> None:
    rows = published_beside(compared(scoring("fedlps", flops_rowmask=0.8e12), result("fedavg")))
    own = next(row for row in rows if row.run == "fedlps")
    assert own.flops.mean == pytest.approx(0.8)
    assert not own.flops.flagged
    beside = page_of(rows)
    assert beside is not None
    assert "Both count training alone." in beside.caption


def test_every_file_of_a_report_has_both_numbers(tmp_path: Path) -> None:
    folder = save(tmp_path / "runs", scoring("fedlps"), result("fedavg"))
    write_report(folder, read_comparisons(folder), out=tmp_path / "out")
    lines = csv.DictReader(io.StringIO((tmp_path / "out/compare.csv").read_text()))
    own = next(line for line in lines if line["method"] == "fedlps")
    assert float(own["flops_compact"]) == 100 * (FLOPS + SCORING)
    assert float(own["flops_compact_training"]) == 100 * FLOPS
    summary = json.loads((tmp_path / "out/compare.json").read_text())["summary"]["fedlps"]
    assert summary["simulated_seconds_training"]["mean"] == 100 * SECONDS
    for name in ("table.md", "table.tex", "report.html"):
        assert (tmp_path / "out" / name).read_text().count("training alone") >= 2, name


def test_the_table_of_one_run_has_both_numbers_where_it_scores() -> None:
    def shown(raw: dict[str, Any]) -> str:
        text = io.StringIO()
        Console(file=text, width=100).print(result_table(raw))
        return text.getvalue()

    whole = Trial.of(scoring("fedlps")).result
    assert whole is not None
    assert shown(dict(whole)).count("training alone") == 2
    assert "training alone" not in shown(result("fedavg"))
    assert not [column for column in COLUMNS if "training" in column.name]


def test_the_pareto_chart_says_that_old_rows_lack_scoring_and_spreads_high_accuracies(tmp_path: Path) -> None:
    old = {**result("fedlps", accuracies={100: 0.987}), "policies": {"personal": "OwnModel(select='best')"}}
    rivals = (result("fedavg", accuracies={100: 0.965}), result("fjord", accuracies={100: 0.4}))
    front = next(chart for chart in charts_of(compared(old, *rivals)) if chart.kind == "front")
    assert front.title.startswith("Pareto chart")
    assert "some without scoring" in front.x
    assert "scoring" not in next(chart for chart in charts_of(compared(scoring("fedlps"), *rivals))).x
    draw_chart(front, tmp_path / "front.svg")
    drawn = (tmp_path / "front.svg").read_text()
    assert all(f">{tick}%<" in drawn for tick in (50, 90, 95, 98, 99))
