"""The page: one file that needs nothing else, read by a browser at the width of a desk and of a phone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import Browser, chromium
from saved_results import result, save

from sparsekit_fl.cli.report import write_files

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
    write_files(folder)
    return folder / "report.html"


class _Balanced(HTMLParser):
    """Every element is closed in its turn."""

    empty = frozenset({"meta", "br", "input", "path", "use", "rect"})

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
    outside = re.findall(r"""(?:src|href)\s*=\s*["'](?!#)[^"']*|@import[^;]*|url\((?!#)[^)]*\)""", text)
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


@pytest.fixture(scope="module", params=[(1280, 900, False), (390, 844, True)], ids=["desk", "phone"])
def window(request: pytest.FixtureRequest, report: Path) -> Iterator[Browser]:
    width, height, phone = request.param
    with chromium(width, height, phone=phone) as browser:
        yield browser


def test_a_browser_shows_it_without_errors_and_without_scrolling_sideways(
    window: Browser, report: Path, tmp_path: Path
) -> None:
    window.open(report)
    assert window.errors() == []
    assert window.run("document.documentElement.scrollWidth <= innerWidth")
    window.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    smallest = window.run(
        "Math.min(...[...document.querySelectorAll('figure svg text')].map(text =>"
        " parseFloat(getComputedStyle(text).fontSize) * Math.hypot(text.getScreenCTM().a, text.getScreenCTM().b)))"
    )
    assert smallest >= 9, "the letters of a chart must be readable"


def test_heads_sort_numbers_down_first_then_up_and_words_by_letter(window: Browser, report: Path) -> None:
    window.open(report)
    names = "[...document.querySelectorAll('table')[0].tBodies[0].rows].map(row => row.children[0].dataset.value)"
    window.run("document.querySelectorAll('table')[0].tHead.rows[0].children[2].click()")
    assert window.run(names) == ["fedavg", "cs", "fedlps", NASTY]
    window.run("document.querySelectorAll('table')[0].tHead.rows[0].children[2].click()")
    assert window.run(names) == [NASTY, "fedlps", "cs", "fedavg"]
    assert window.run("document.querySelector('th[aria-sort=ascending]').textContent") == "personal accuracy"
    window.run("document.querySelectorAll('table')[0].tHead.rows[0].children[0].click()")
    assert window.run(names) == ["cs", "fedavg", "fedlps", NASTY]
    target = (
        "[...document.querySelectorAll('table')[0].tHead.rows[0].children].findIndex(h => h.textContent.startsWith('time'))"
    )
    for _ in range(2):
        window.run(f"document.querySelectorAll('table')[0].tHead.rows[0].children[{target}].click()")
        assert window.run(names)[-1] == NASTY, "what never reached the target stays last"


def test_chips_hide_a_method_in_tables_and_charts(window: Browser, report: Path) -> None:
    window.open(report)
    shown = "[...document.querySelectorAll('[data-method=fedlps]')].filter(e => getComputedStyle(e).display !== 'none').length"
    before = window.run(shown)
    assert before > 8
    window.run("document.querySelector('[data-toggle=fedlps]').click()")
    assert window.run(shown) == 0
    assert window.run("document.querySelector('[data-toggle=fedlps]').getAttribute('aria-pressed')") == "false"
    window.run("document.querySelector('[data-every=on]').click()")
    assert window.run(shown) == before
    window.run("document.querySelector('[data-every=off]').click()")
    assert window.run("[...document.querySelectorAll('tbody tr')].every(e => getComputedStyle(e).display === 'none')")


def test_light_and_dark_are_a_button_and_both_can_be_read(window: Browser, report: Path) -> None:
    window.open(report)
    paper = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('figure svg text')).fill"
    light, dark_ink = window.run(paper), window.run(ink)
    window.run("document.getElementById('theme').click()")
    assert window.run(paper) != light
    assert window.run(ink) != dark_ink
    assert window.run("document.getElementById('theme').textContent") == "Light"
