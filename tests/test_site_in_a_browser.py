"""The site in a browser, from a disk and without a network: phone and desk, light and dark, with a search that answers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, chromium

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
SHOWN = (
    "index.html",
    "tutorials/prune.html",
    "concepts/budget.html",
    "evidence/mnist.html",
    "reference/sparsekit.html",
    "evidence/faults.html",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_every_link_leads_to_a_page_and_an_anchor_that_are_there(site: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    broken = set()
    for path, text in pages.items():
        for link in re.findall(r'<a [^>]*href="([^"]+)"', text):
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:|//", target) or path.name == "404.html":
                continue
            there = (path.parent / target).resolve() if target else path
            if not there.exists() or (anchor and there.suffix == ".html" and anchor not in anchors[there]):
                broken.add(f"{path.relative_to(site)}: {link}")
    assert broken == set()


def test_nothing_is_asked_of_a_network(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        outside = re.findall(r"""<(?:script|link|img|iframe)[^>]*(?:src|href)=["']((?:https?:)?//[^"']+)""", text)
        assert [link for link in outside if "rel=canonical" not in link] == [], path.name
    for path in site.rglob("*.css"):
        assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", path.read_text(encoding="utf-8")) == [], path.name


@pytest.fixture(
    scope="module",
    params=[(1280, 900, False, "light"), (1280, 900, False, "dark"), (390, 844, True, "light"), (390, 844, True, "dark")],
    ids=["desk-light", "desk-dark", "phone-light", "phone-dark"],
)
def window(request: pytest.FixtureRequest) -> Iterator[Browser]:
    width, height, phone, scheme = request.param
    with chromium(width, height, phone=phone) as browser:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.call("/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}})
        yield browser


@pytest.mark.parametrize("page", SHOWN)
def test_a_page_fits_its_window_and_complains_of_nothing(window: Browser, site: Path, page: str) -> None:
    window.open(site / page)
    time.sleep(0.3)
    assert window.errors() == []
    assert window.run("document.documentElement.scrollWidth <= innerWidth + 1"), "it scrolls sideways"
    assert window.run("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    contrast = window.run(
        "(() => { const part = document.querySelector('.md-content p');"
        " const rgb = colour => colour.match(/[\\d.]+/g).map(Number);"
        " const ink = rgb(getComputedStyle(part).color), paper = rgb(getComputedStyle(document.body).backgroundColor);"
        " return Math.abs(ink[0] - paper[0]) + Math.abs(ink[1] - paper[1]) + Math.abs(ink[2] - paper[2]); })()"
    )
    assert contrast > 250, "ink and paper are too near"


def test_the_search_answers_from_a_disk(window: Browser, site: Path) -> None:
    window.open(site / "index.html")
    time.sleep(0.5)
    window.run(
        "(() => { const box = document.querySelector('.md-search__input'); box.focus(); box.value = 'importance';"
        " box.dispatchEvent(new Event('input', {bubbles: true}));"
        " box.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true})); return true; })()"
    )
    for _ in range(40):
        if window.run("document.querySelectorAll('.md-search-result__item').length"):
            return
        time.sleep(0.25)
    raise AssertionError("no result")
