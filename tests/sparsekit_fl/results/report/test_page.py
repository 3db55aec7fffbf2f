"""The page: one file that needs nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from saved_results import result, save

from sparsekit_fl.paper.report import write_report


def test_it_is_one_file_that_asks_nothing_of_a_network_and_escapes_text_of_others(tmp_path: Path) -> None:
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
