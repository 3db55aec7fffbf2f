"""The page: one file that needs nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from saved_results import result, save

from sparsekit_fl.paper.report import write_report

NASTY = "own<b>&\"'method"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("page")
    made = [result(name, seed, accuracies={50: 0.4, 100: 0.9 - place / 50}, note="Saves bytes." if name == "cs" else "")
            for place, name in enumerate(("fedavg", "cs", "fedlps")) for seed in (0, 1)]  # fmt: skip
    save(folder, *made)
    odd = result(NASTY, accuracies={50: 0.3, 100: 0.5})
    save(folder, {**odd, "method": "odd"})
    path = next(folder.glob("odd-*")) / "result.json"
    path.write_text(path.read_text().replace('"odd"', '"own<b>&\\"\'method"', 1))
    write_report(folder)
    return folder / "report.html"


class _Balanced(HTMLParser):
    """Every element is closed in its turn."""

    empty = frozenset({"meta", "br", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.empty:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.empty and (not self.open or self.open.pop() != tag):
            self.wrong.append(tag)


def test_it_is_one_file_that_asks_nothing_of_a_network(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    outside = re.findall(r"""(?:src|href)\s*=\s*["'](?!#|data:)[^"']*|@import[^;]*|url\((?!#)[^)]*\)""", text)
    assert outside == []
    parser = _Balanced()
    parser.feed(text)
    assert parser.wrong == []
    assert parser.open == []
    assert '<meta name="viewport"' in text


def test_text_of_others_is_escaped(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    assert "own<b>" not in text
    assert "own&lt;b&gt;&amp;" in text
