"""The report: one page from saved results alone, on the terminal and as JSON, and the points of its picture."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from saved_results import FLOPS, SECONDS, compared, result, save

from sparsekit.cli.main import execute
from sparsekit_fl.report import curves_of

pytest.importorskip("matplotlib", reason="matplotlib is not installed; pip install '.[report]'")


def page(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def test_it_prints_the_tables_and_says_where_the_page_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = result("fedavg", note="A note.")
    made["environment"] = {"sparsekit": "0.2.0", "finished": "2026-11-22T10:00:00+00:00"}
    save(tmp_path, made, result("local"), *(result(f"m{number}") for number in range(7)))  # more than there are colors
    assert execute(["report", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for part in ("cnn on mnist, 100 clients, 100 rounds", "75.0%", "fedavg: A note.", "published numbers", "88.15 ± 1.14"):
        assert part in captured.out
    assert f"tables and a picture are in {tmp_path / 'report.html'}" in captured.out.replace("\n", "")
    first = page(tmp_path)
    for part in ("75.0%", "data:image/svg+xml", "sparsekit 0.2.0; 2026-11-22", "classes per client 2", "cohort 10"):
        assert part in first
    assert execute(["report", str(tmp_path), "--json"]) == 0
    assert page(tmp_path) == first, "equal results make equal bytes"


def test_several_folders_need_a_folder_for_the_page_and_json_is_a_list_of_comparisons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = str(save(tmp_path / "a", result("fedlps"), result("fedavg")))
    second = str(save(tmp_path / "b", result("fedlps"), result("fedavg", 1, dataset="digits")))
    assert execute(["report", first, second]) == 2
    assert "pass --out FOLDER" in capsys.readouterr().err
    assert execute(["report", first, second, "--out", str(tmp_path / "out"), "--json"]) == 0
    mnist, digits = json.loads(capsys.readouterr().out)
    assert mnist["methods"] == ["fedavg", "fedlps"], "the run that is in both counts once"
    assert digits["summary"]["fedavg"]["cost.simulated_seconds"] == {"mean": 50.0, "std": None}
    assert not (tmp_path / "a/report.html").exists()
    assert [page(tmp_path / "out").count(f"<h2>cnn on {data}") for data in ("mnist", "digits")] == [1, 1]


def test_the_page_asks_nothing_of_a_network_and_escapes_text_of_others(tmp_path: Path) -> None:
    save(tmp_path, *(result(name, seed, note="Saves <b>bytes</b>.") for name in ("fedavg", "fedlps") for seed in (0, 1)))
    (tmp_path / "own").mkdir()
    (tmp_path / "own/result.json").write_text(json.dumps(result("own<b>&\"'method", accuracies={50: 0.3, 100: 0.5})))
    assert execute(["report", str(tmp_path)]) == 0
    text = page(tmp_path)
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:)[^"']*|@import[^;]*|url\((?!#)[^)]*\)""", text) == []
    assert '<meta name="viewport"' in text
    body = text[text.index("<body>") :]
    for tag in ("section", "table", "tr", "th", "td", "p", "div"):
        assert len(re.findall(rf"<{tag}[ >]", body)) == body.count(f"</{tag}>"), tag
    assert "own<b>" not in text
    assert "<b>bytes" not in text
    assert "own&lt;b&gt;&amp;" in text


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
