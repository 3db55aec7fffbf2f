"""`sparsekit report`: tables on the terminal, files in the folder, JSON for machines."""

import json
import sys
from pathlib import Path

import pytest
from saved_results import result, save

from sparsekit.cli.main import execute


def test_it_prints_the_tables_and_says_where_the_page_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, result("fedavg", note="A note."), result("local"))
    assert execute(["report", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for part in ("cnn on mnist, 100 clients, 100 rounds", "75.0%", "¹ A note.", "beside the published tables", "88.15 ± 1.14"):
        assert part in captured.out
    assert f"open {tmp_path / 'report.html'}" in captured.out.replace("\n", "")
    assert (tmp_path / "report.html").exists()


def test_json_is_a_list_of_comparisons_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # figures take long and are not looked at
    save(tmp_path / "in", result("fedavg"))
    assert execute(["report", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--target", "0.6", "--json"]) == 0
    captured = capsys.readouterr()
    (found,) = json.loads(captured.out)
    assert found["methods"] == ["fedavg"]
    assert found["summary"]["fedavg"]["target_seconds"] == {"mean": 50.0, "deviation": None, "count": 1, "of": 1}
    assert (tmp_path / "out/table.tex").exists()
    assert not (tmp_path / "in/table.tex").exists()
