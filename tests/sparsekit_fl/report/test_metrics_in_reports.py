"""Tables and curves of what is not mean accuracy: other metrics, means by examples, the worst tenth, the global model."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from sparsekit_fl.methods import fedavg
from sparsekit_fl.problem.metrics import accuracy
from sparsekit_fl.report.charts import charts_of
from sparsekit_fl.report.comparison import Comparison
from sparsekit_fl.report.table import result_table
from sparsekit_fl.report.trials import Trial, sections_of
from sparsekit_fl.report.write import read_comparisons, write_report
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing.tiny import tiny_clients, tiny_config, tiny_problem


def margin_error(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    top = outputs.topk(2, dim=-1).values
    return (top[:, 0] - top[:, 1] < 0.5).float().sum(), torch.tensor(float(len(targets)))


def finished(metrics: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    config = replace(tiny_config(seed=seed), eval_global_every=2)
    about = {"experiment": {"model": "tiny", "dataset": "points", "clients": 8}}
    return run(fedavg(), replace(tiny_problem(), metrics=metrics), tiny_clients(), config, **about).to_dict()


def comparison(metrics: dict[str, Any]) -> Comparison:
    return Comparison(sections_of([Trial.of(finished(metrics, seed)) for seed in (0, 1)])[0])


def printed(what: Any) -> str:
    text = io.StringIO()
    Console(file=text, width=400).print(what)
    return text.getvalue()


def test_the_table_of_a_run_has_every_metric_with_its_worst_tenth() -> None:
    text = printed(result_table(finished({"accuracy": accuracy, "margin_error": margin_error})))
    for title in ("accuracy, by examples", "accuracy, worst tenth", "margin_error", "margin_error, worst tenth", "loss, worst"):
        assert title in text


def test_the_table_of_a_problem_without_accuracy_has_its_metrics_and_no_empty_row() -> None:
    text = printed(result_table(finished({"margin_error": margin_error})))
    assert "margin_error, by examples" in text
    assert "accuracy" not in text
    assert "–" not in text


def test_a_comparison_has_these_columns_and_knows_which_direction_is_good() -> None:
    found = comparison({"accuracy": accuracy, "margin_error": margin_error})
    columns = {column.name: column for column in found.columns}
    assert {"personal_accuracy_worst", "personal_margin_error", "personal_loss_weighted"} <= set(columns)
    assert columns["personal_accuracy_worst"].larger
    assert not columns["personal_margin_error"].larger
    trial = found.to_dict()["trials"][0]
    assert trial["personal_accuracy_worst"] <= trial["personal_accuracy"]
    assert "personal_margin_error_worst" in found.to_csv().splitlines()[0]


def test_curves_show_the_global_model_the_worst_tenth_and_other_metrics() -> None:
    charts = {chart.name: chart for chart in charts_of(comparison({"accuracy": accuracy, "margin_error": margin_error}))}
    wanted = {"accuracy-global-rounds", "accuracy-worst-rounds", "margin_error-rounds", "loss-worst-rounds", "accuracy-rounds"}
    assert wanted <= set(charts)
    assert charts["accuracy-global-rounds"].series[0].x == (2.0, 4.0)
    assert charts["loss-rounds"].y_unit == "number"


@pytest.mark.slow
@pytest.mark.parametrize("metrics", [{"accuracy": accuracy}, {"margin_error": margin_error}], ids=["accuracy", "another"])
def test_a_report_is_written_whatever_the_metrics_are(metrics: dict[str, Any], tmp_path: Path) -> None:
    for package in ("pandas", "matplotlib", "jinja2"):
        pytest.importorskip(package, reason=f"{package} is not installed; pip install 'sparsekit-torch[report]'")
    run(fedavg(), replace(tiny_problem(), metrics=metrics), tiny_clients(), tiny_config(), out=tmp_path / "run")
    written = write_report(tmp_path, read_comparisons(tmp_path))
    assert any(path.name == "loss-rounds.svg" for path in written)
    assert "worst tenth" in (tmp_path / "report.html").read_text()
