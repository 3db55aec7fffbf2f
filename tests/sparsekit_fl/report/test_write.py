"""write_report: which files there are, from files alone, twice to the same bytes, and without the extra `report`."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from saved_results import result, save

from sparsekit.errors import DataError, InvalidValueError, MissingDependencyError
from sparsekit_fl.cli.report import write_files
from sparsekit_fl.paper.published import in_published_order
from sparsekit_fl.report import text
from sparsekit_fl.report.write import read_comparisons, write_report

pytestmark = pytest.mark.slow


def test_a_comparison_becomes_tables_figures_and_a_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save(tmp_path, result("fedavg"), result("local"))
    written = write_files(tmp_path)[1]
    names = {str(path.relative_to(tmp_path)) for path in written}
    assert {"compare.json", "compare.csv", "table.tex", "table.md", "published.csv", "report.html"} <= names
    assert {"figures/accuracy-flops.png", "figures/accuracy-flops.svg", "figures/bars-time.png"} <= names
    assert all(path.stat().st_size for path in written)
    assert not list(tmp_path.rglob(".*.tmp"))
    first = {path: path.read_bytes() for path in written if path.suffix != ".png"}
    assert write_files(tmp_path)[1] == written
    assert {path: path.read_bytes() for path in first} == first


def test_several_protocols_have_names_of_their_own(tmp_path: Path) -> None:
    save(tmp_path / "in", result("fedavg"), result("fedavg", 1, dataset="digits"))
    _, written = write_files(tmp_path / "in", out=tmp_path / "out")
    names = {str(path.relative_to(tmp_path / "out")) for path in written}
    assert {f"cnn-on-{data}-100-clients-100-rounds-compare.csv" for data in ("mnist", "digits")} <= names
    assert "cnn-on-digits-100-clients-100-rounds-published.csv" not in names
    assert [name for name in names if name.endswith(".html")] == ["report.html"]
    assert not (tmp_path / "in/report.html").exists()


def test_the_order_and_the_target_of_the_last_report_stay(tmp_path: Path) -> None:
    save(tmp_path, result("fedavg"), result("local"), result("own"))
    (default,) = read_comparisons(tmp_path, sort=in_published_order)
    assert default.section.methods == ("fedavg", "local", "own"), "published first, then as found"
    write_files(tmp_path, target=0.7, order=["local", "own"])
    (again,) = read_comparisons(tmp_path, sort=in_published_order)
    assert again.section.methods == ("local", "own", "fedavg")
    assert again.goal == 0.7
    (asked,) = read_comparisons(tmp_path, target=0.5)
    assert asked.goal == 0.5
    write_files(tmp_path)
    assert json.loads((tmp_path / "compare.json").read_text())["asked_target"] == 0.7


def test_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no result"):
        write_files(tmp_path)
    with pytest.raises(InvalidValueError, match="target"):
        write_files(save(tmp_path, result("a")), target=90)
    assert not (tmp_path / "figures").exists()


def test_a_comparison_in_which_all_failed_is_a_page_with_the_errors(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    raw = {"method": "a", "seed": 0, "config": result("a")["config"], "policies": {}, "error": "it <broke>"}
    (tmp_path / "a/trial.json").write_text(json.dumps(raw))
    write_files(tmp_path)
    assert "it &lt;broke&gt;" in (tmp_path / "report.html").read_text()


def test_without_matplotlib_there_are_tables_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    save(tmp_path, result("fedavg"))
    logger = logging.getLogger("sparsekit_fl")
    monkeypatch.setattr(logger, "propagate", True)
    written = {path.name for path in write_files(tmp_path)[1]}
    assert written == {"compare.json", "compare.csv", "table.tex", "table.md", "published.csv", "report.html"}
    assert 'pip install "sparsekit-torch[report]"' in caplog.text


@pytest.mark.parametrize("package", ["jinja2", "pandas"])
def test_without_a_package_of_the_extra_it_is_named_and_the_numbers_are_written(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, result("fedavg"))
    text._environment.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=rf'needs {package}; pip install "sparsekit-torch\[report\]"'):
        write_files(tmp_path)
    assert json.loads((tmp_path / "compare.json").read_text())["methods"] == ["fedavg"]


def test_a_report_needs_nothing_beside_it(tmp_path: Path) -> None:
    save(tmp_path, result("fedavg"))
    written = write_report(tmp_path, read_comparisons(tmp_path))
    names = {path.name for path in written}
    assert {"compare.csv", "table.md", "report.html"} <= names
    assert "published.csv" not in names
    assert "published" not in (tmp_path / "table.md").read_text()


def test_drawing_needs_no_torch(tmp_path: Path) -> None:
    save(tmp_path, result("fedavg"))
    program = (
        "import sys\nfrom sparsekit.cli.main import execute\n"
        f"code = execute(['report', {str(tmp_path)!r}, '--quiet'])\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
