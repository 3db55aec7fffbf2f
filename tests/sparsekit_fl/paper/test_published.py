"""Published numbers beside ours: what is flagged, and why."""

from __future__ import annotations

import csv
import io
import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from saved_results import result

from sparsekit.errors import DataError
from sparsekit_fl.methods import registry
from sparsekit_fl.paper.published import (
    UNEXPLAINED,
    Published,
    in_published_order,
    published_beside,
)
from sparsekit_fl.paper.tables import published_csv, show_published
from sparsekit_fl.report.comparison import Comparison
from sparsekit_fl.report.trials import Trial, sections_of
from sparsekit_fl.report.write import read_comparisons


def _beside(*results: dict[str, Any], folder: Path | None = None) -> list[Published]:
    (section,) = sections_of(map(Trial.of, results))
    return published_beside(Comparison(section), folder=folder)


def _fedavg(accuracy: float, seed: int = 0, **more: Any) -> dict[str, Any]:
    return result("fedavg", seed, accuracies={more.get("rounds", 100): accuracy}, **more)


def test_the_data_hold_every_row_of_both_tables() -> None:
    from importlib.resources import files

    tables = json.loads(files("sparsekit_fl.paper").joinpath("published.json").read_text())["tables"]
    assert [len(rows) for rows in tables.values()] == [21, 5]
    assert tables["Table I"][0]["cifar10"] == [31.28, 1.24, 825.4]
    assert tables["Table I"][-1] == {
        "method": "FedLPS", "mnist": [96.77, 0.11, 0.8], "cifar10": [87.43, 0.19, 268.5], "cifar100": [62.8, 0.05, 1706.7],
        "tiny-imagenet": [21.48, 0.12, 9307.3], "reddit": [26.17, 0.04, 4.2],
    }  # fmt: skip
    assert tables["Table II"][3]["reddit"] == [25.2, 0.06, 4.6]
    assert tables["Table I"][-1]["mnist"] == tables["Table II"][-1]["mnist"]


def test_an_accuracy_is_flagged_beyond_two_deviations_of_both_together() -> None:
    # 88.15 ± 1.14: one seed has no deviation of its own, so the bounds are ± 2.28.
    (inside,), (outside,) = _beside(_fedavg(0.9042)), _beside(_fedavg(0.9044))
    assert not inside.accuracy.flagged
    assert inside.accuracy.reason == inside.reason == ""
    assert outside.accuracy.flagged
    assert outside.accuracy.difference == pytest.approx(2.29)
    # Two seeds at 90 and 92 %: deviation 1.414, together 1.817, so 91 is within 88.15 ± 3.63.
    (spread,) = _beside(_fedavg(0.90), _fedavg(0.92, 1))
    assert spread.accuracy.mean == pytest.approx(91.0)
    assert not spread.accuracy.flagged


def test_flops_are_flagged_beyond_the_rounding_of_the_table() -> None:
    (exact,), (other,) = _beside(_fedavg(0.88)), _beside(_fedavg(0.88, flops_rowmask=2.86e12))
    assert exact.flops.mean == pytest.approx(2.788128)
    assert not exact.flops.flagged
    assert other.flops.flagged
    assert other.flops.reason == UNEXPLAINED
    assert other.reason == f"FLOPs: {UNEXPLAINED}"


def test_methods_are_matched_by_their_letters_and_come_in_published_order() -> None:
    rows = _beside(*(result(name) for name in ("fedlps-paper", "p-ucbv-dyn", "fedlps", "per-fedavg", "mine", "fedavg")))
    assert [(row.table, row.method, row.run) for row in rows] == [
        ("Table I", "FedAvg", "fedavg"),
        ("Table I", "Per-FedAvg", "per-fedavg"),
        ("Table I", "FedLPS", "fedlps-paper"),
        ("Table I", "FedLPS", "fedlps"),
        ("Table II", "P-UCBV-Dyn", "p-ucbv-dyn"),
    ]
    assert in_published_order(["local", "fedlps", "own", "fedavg"]) == ["fedavg", "fedlps", "local", "own"]


def test_every_published_name_that_is_registered_is_found_by_its_letters() -> None:
    found = {row.run for row in _beside(*(result(name) for name in registry))}
    assert {"fedavg", "fedlps", "fedlps-paper"} <= found
    assert "local" not in found


def test_other_data_and_other_levels_have_no_published_numbers() -> None:
    assert _beside(result("fedavg", dataset="digits")) == []
    assert _beside(result("fedavg", lack_classes=8)) == []
    low = _beside(result("fedavg", heterogeneity="low"), result("fedavg", accuracies={100: 0.8}))
    assert [row.accuracy.mean for row in low] == [80.0]


def test_another_protocol_is_the_reason_before_any_other() -> None:
    (row,) = _beside(_fedavg(0.99, rounds=30, flops_rowmask=1e12))
    assert row.accuracy.reason == "Another protocol: 30 rounds instead of 100."
    assert row.reason == row.accuracy.reason, "once where both numbers differ for it"
    (row,) = _beside(_fedavg(0.99, clients=10))
    assert row.accuracy.reason == "Another protocol: 10 clients instead of 100."


def test_the_readers_own_reasons_come_first(tmp_path: Path) -> None:
    own = [{"quantity": "accuracy", "methods": ["FedAvg"], "sign": "lower", "reason": "We stopped early."}]
    (tmp_path / "reasons.json").write_text(json.dumps(own))
    (row,) = _beside(_fedavg(0.5), folder=tmp_path)
    assert row.accuracy.reason == "We stopped early."
    (row,) = _beside(_fedavg(0.99), folder=tmp_path)
    assert "released FedAvg code" in row.accuracy.reason


def test_a_reason_may_be_of_one_of_the_runs_that_stand_beside_a_published_row(tmp_path: Path) -> None:
    own = [{"quantity": "accuracy", "methods": ["fedlps-paper"], "reason": "It diverged."}]
    (tmp_path / "reasons.json").write_text(json.dumps(own))
    ours, paper = _beside(result("fedlps", 0.5), result("fedlps-paper", 0.5), folder=tmp_path)
    assert paper.accuracy.reason == "It diverged."
    assert ours.accuracy.reason == UNEXPLAINED


@pytest.mark.parametrize("text", ["{", "[{}]", '[{"reason": 3}]'])
def test_reasons_that_cannot_be_read_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "reasons.json").write_text(text)
    with pytest.raises(DataError, match="must be a list of objects such as"):
        _beside(_fedavg(0.5), folder=tmp_path)


def test_every_recorded_reason_is_a_sentence_about_published_methods() -> None:
    from importlib.resources import files

    home = files("sparsekit_fl.paper")
    published = json.loads(home.joinpath("published.json").read_text())
    names = {row["method"] for rows in published["tables"].values() for row in rows} | {"*", *published["also"]}
    for entry in json.loads(home.joinpath("reasons.json").read_text()):
        assert set(entry) == {"quantity", "sign", "datasets", "methods", "reason", "basis", "checked"}
        assert entry["basis"] in ("measured", "code", "numbers", "guess")
        assert date.fromisoformat(entry["checked"]) >= date(2026, 11, 22)
        assert entry["quantity"] in ("accuracy", "flops")
        assert entry["sign"] in ("any", "higher", "lower")
        assert set(entry["methods"]) <= names
        assert entry["reason"][0].isupper()
        assert entry["reason"].endswith(".")


def test_each_difference_of_the_saved_results_has_a_reason_and_a_guess_says_that_it_is_one() -> None:
    folder = Path(__file__).parents[3] / "examples/paper"
    (comparison,) = read_comparisons(folder / "compare-mnist")
    rows = published_beside(comparison)
    assert len({row.method for row in rows}) == 26, "every row of both tables was run"
    found = {(row.run, name): pair for row in rows for name, pair in (("accuracy", row.accuracy), ("flops", row.flops))}
    assert [key for key, pair in found.items() if pair.flagged and pair.reason == UNEXPLAINED] == []
    assert "not measured" in found["fedmp", "accuracy"].reason
    assert "not measured" not in found["fedavg", "accuracy"].reason
    assert "two, and both are counted" in found["per-fedavg", "flops"].reason
    for comparison in read_comparisons(folder / "compare-cifar10"):
        for row in published_beside(comparison):
            assert row.accuracy.reason == "Another protocol: 10 rounds instead of 100."


def test_it_is_shown_within_eighty_columns_with_reasons_below() -> None:
    text = io.StringIO()
    show_published(_beside(_fedavg(0.99), result("fedlps-paper")), Console(file=text, width=80))
    table, reasons = text.getvalue().split("* differs by more than")
    assert max(map(len, table.splitlines())) <= 80
    assert "…" not in table
    assert "+10.85*" in table
    assert "accuracy of fedavg: The authors' released FedAvg code" in reasons


def test_csv_has_a_line_per_number() -> None:
    rows = list(csv.DictReader(io.StringIO(published_csv(_beside(_fedavg(0.99))))))
    assert [(row["quantity"], row["published"], row["flagged"]) for row in rows] == [
        ("accuracy_percent", "88.15", "1"), ("flops_e12", "2.8", "0")
    ]  # fmt: skip
