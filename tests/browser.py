"""A headless Chromium for tests, spoken to by the WebDriver protocol with the standard library alone."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def _ask(address: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data=data, method=method, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"the browser refused {address}: {error.read().decode()[:2000]}") from error


class Browser:
    """One window."""

    def __init__(self, address: str, session: str) -> None:
        self._base = f"{address}/session/{session}"

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """One WebDriver command; a body makes it a POST."""
        return _ask(self._base + path, body)

    def open(self, path: Path) -> None:
        """Load a file from the disk."""
        self.call("/url", {"url": path.resolve().as_uri()})

    def run(self, script: str) -> Any:
        """What a JavaScript expression evaluates to."""
        return self.call("/execute/sync", {"script": f"return {script}", "args": []})

    def errors(self) -> list[str]:
        """What the page complained of since the last call."""
        return [entry["message"] for entry in self.call("/se/log", {"type": "browser"}) if entry["level"] == "SEVERE"]

    def screenshot(self, path: Path) -> None:
        """A picture of the window."""
        path.write_bytes(base64.b64decode(self.call("/screenshot")))


@contextmanager
def chromium(width: int, height: int, *, phone: bool = False) -> Iterator[Browser]:
    """A window of a size; the test is skipped where there is no Chromium or no driver of it."""
    program = next((found for name in _NAMES if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("no Chromium with chromedriver here; apt-get install chromium chromium-driver")
    process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        port = next(found[1] for line in process.stdout if (found := re.search(r"started successfully on port (\d+)", line)))
        options: dict[str, Any] = {
            "binary": program,
            # Containers run as root and have a small /dev/shm.
            "args": [
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                f"--window-size={width},{height}",
            ],
        }
        if phone:
            options["mobileEmulation"] = {"deviceMetrics": {"width": width, "height": height, "pixelRatio": 2.0}}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        address = f"http://127.0.0.1:{port}"
        session = _ask(f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        try:
            yield Browser(address, session)
        finally:
            _ask(f"{address}/session/{session}", method="DELETE")
    finally:
        process.terminate()
        process.wait(timeout=30)
        if process.stdout is not None:
            process.stdout.close()
