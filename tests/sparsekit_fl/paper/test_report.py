"""write_report: which files there are, from files alone, twice to the same bytes, and without the extra `report`."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from saved_results import result, save

from sparsekit.errors import InvalidValueError
from sparsekit_fl.paper.report import read_comparisons, write_report

pytestmark = pytest.mark.slow
TABLES = {"compare.json", "compare.csv", "table.tex", "table.md", "report.html"}


def test_a_comparison_becomes_tables_figures_and_a_page_twice_the_same(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save(tmp_path, *(result(name, heterogeneity=level) for name in ("fedlps", "fedavg") for level in ("low", "high")))
    written = write_report(tmp_path)[1]
    names = {str(path.relative_to(tmp_path)) for path in written}
    plots = {f"figures/{name}-heterogeneity-high.svg" for name in ("accuracy-flops", "bars-time", "front")}
    wanted = {"published.csv", "figures/accuracy-heterogeneity.svg", "figures/paper-3-accuracy-flops.png", *plots}
    assert TABLES | wanted <= names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written if path.suffix == ".png")
    assert not list(tmp_path.rglob(".*.tmp"))
    first = {path: path.read_bytes() for path in written if path.suffix != ".png"}
    assert write_report(tmp_path)[1] == written
    assert {path: path.read_bytes() for path in first} == first


def test_several_protocols_in_several_folders_make_one_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first = save(tmp_path / "a", result("fedlps"), result("fedavg"))
    second = save(tmp_path / "b", result("fedlps"), result("fedavg", 1, dataset="digits"))
    with pytest.raises(InvalidValueError, match="pass --out FOLDER"):
        write_report(first, second)
    comparisons, written = write_report(first, second, out=tmp_path / "out", target=0.7)
    assert [len(each.trials) for each in comparisons] == [2, 1], "the run that is in both counts once"
    names = {str(path.relative_to(tmp_path / "out")) for path in written}
    assert {f"cnn-on-{data}-100-clients-100-rounds-compare.csv" for data in ("mnist", "digits")} <= names
    assert "cnn-on-digits-100-clients-100-rounds-published.csv" not in names
    assert not (tmp_path / "a/report.html").exists()
    page = (tmp_path / "out/report.html").read_text()
    for part in (
        "Figures of the paper",
        "Figure 3: test accuracy against FLOPs",
        "Figure 6 of the paper needs fedlps and a rival",
    ):
        assert part in page
    write_report(first, second, out=first)
    assert {one.target for one in read_comparisons(first)} == {None}
    write_report(first, second, out=first, target=0.7)
    assert {one.target for one in read_comparisons(first)} == {0.7}, "the target of a report of several protocols is kept"


def test_a_comparison_in_which_all_failed_is_a_page_with_the_errors(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    raw = {"method": "a", "seed": 0, "config": result("a")["config"], "policies": {}, "error": "it <broke>"}
    (tmp_path / "a/trial.json").write_text(json.dumps(raw))
    write_report(tmp_path)
    assert "it &lt;broke&gt;" in (tmp_path / "report.html").read_text()
    assert "it <broke>" in (tmp_path / "table.md").read_text()


def test_without_matplotlib_there_are_tables_and_a_page_with_version_and_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(logging.getLogger("sparsekit_fl"), "propagate", True)
    cheap, dear = result("fedlps", accuracies={50: 0.4, 100: 0.895}), result("fedavg", accuracies={50: 0.4, 100: 0.9})
    for made in (cheap, dear):
        made["environment"] = {"sparsekit": "0.2.0", "finished": "2026-11-22T10:00:00+00:00"}
        made["config"]["experiment"]["partition_options"] = {"distinct": False, "classes_per_client": 2}
    save(tmp_path, cheap, dear)
    assert {path.name for path in write_report(tmp_path, command="sparsekit compare fedlps fedavg")[1]} == TABLES
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    for part in (
        "89.5%", "sparsekit 0.2.0, 2026-11-22", 'data-file="compare.csv"', "sparsekit compare fedlps fedavg",
        "2 classes a client",
    ):  # fmt: skip
        assert part in text
    assert "distinct" not in text
    write_report(tmp_path)
    assert "sparsekit compare fedlps fedavg" in (tmp_path / "report.html").read_text(encoding="utf-8"), "the command is kept"
    assert 'pip install "sparsekit-torch[report]"' in caplog.text


def test_drawing_needs_no_torch(tmp_path: Path) -> None:
    save(tmp_path, result("fedavg"))
    program = (
        "import sys\nfrom sparsekit.cli.main import execute\n"
        f"code = execute(['report', {str(tmp_path)!r}, '--quiet'])\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_is_one_file_that_asks_nothing_of_a_network_and_escapes_text_of_others(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save(tmp_path, *(result(name, seed, note="Saves bytes.") for name in ("fedavg", "fedlps") for seed in (0, 1)))
    (tmp_path / "own").mkdir()
    (tmp_path / "own/result.json").write_text(json.dumps(result("own<b>&\"'method", accuracies={50: 0.3, 100: 0.5})))
    write_report(tmp_path)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    outside = re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:)[^"']*|@import[^;]*|url\((?!#)[^)]*\)""", text)
    assert outside == []
    assert '<meta name="viewport"' in text
    body = text[text.index("<body>") :]
    for tag in ("section", "table", "tr", "th", "td", "p", "figure", "div", "small", "sup", "span"):
        assert len(re.findall(rf"<{tag}[ >]", body)) == body.count(f"</{tag}>"), tag
    assert "own<b>" not in text
    assert "own&lt;b&gt;&amp;" in text
