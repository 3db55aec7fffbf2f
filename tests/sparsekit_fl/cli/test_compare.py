"""`sparsekit compare`: cells, reuse, and the numbers in table and files."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path

import pytest

from sparsekit.cli import execute

TINY = ["--rounds", "2", "--clients", "4", "--cohort", "2", "--local-epochs", "1", "--workers", "1"]


def _numbers(out: Path) -> dict[str, int]:
    return {str(path.relative_to(out)): path.stat().st_mtime_ns for path in out.rglob("result.json")}


def test_methods_times_seeds_with_mean_and_deviation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", "fedavg", "local", "--seeds", "2", "--seed", "5", *TINY, "--out", str(tmp_path)]
    assert execute(command) == 0
    out = capsys.readouterr().out
    assert "2 seeds" in out
    assert "±" in out
    report = json.loads((tmp_path / "compare.json").read_text())
    assert report["methods"] == ["fedavg", "local"]
    assert report["seeds"] == [5, 6]
    assert sorted(_numbers(tmp_path)) == [f"{m}-seed{s}/result.json" for m in ("fedavg", "local") for s in (5, 6)]
    cells = [json.loads((tmp_path / f"fedavg-seed{seed}/result.json").read_text()) for seed in (5, 6)]
    found = [cell["final"]["personal"]["accuracy"] for cell in cells]
    summary = report["summary"]["fedavg"]["personal_accuracy"]
    assert summary["mean"] == pytest.approx(statistics.fmean(found))
    assert summary["deviation"] == pytest.approx(statistics.stdev(found))
    with (tmp_path / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["seed"]) for row in rows] == [("fedavg", "5"), ("local", "5"), ("fedavg", "6"), ("local", "6")]
    assert float(rows[0]["personal_accuracy"]) == found[0]

    before = _numbers(tmp_path)
    assert execute([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"] == report["summary"]
    assert _numbers(tmp_path) == before, "finished cells are not run again"

    assert execute([*command[:4], *command[4:], "--lr", "0.01"]) == 2
    assert "config.training.lr: was 0.1, now 0.01" in capsys.readouterr().err


def test_one_seed_without_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["compare", "fedavg", "--seeds", "1", *TINY]) == 0
    out = capsys.readouterr().out
    assert "one seed" in out
    assert "±" not in out
    assert "--out DIR" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["compare"], "Missing argument"),
        (["compare", "fedavg", "fedavg"], "given twice"),
        (["compare", "fedavg", "fedavgg"], "did you mean 'fedavg'"),
        (["compare", "fedavg", "--seeds", "0"], "--seeds must be an integer >= 1"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(arguments) == 2
    assert says in " ".join(capsys.readouterr().err.replace("│", " ").split())
