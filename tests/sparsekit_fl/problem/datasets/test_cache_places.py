"""Where caches lie on each system. Other systems are simulated by the classes with which platformdirs serves them."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest
from platformdirs import windows
from platformdirs.macos import MacOS
from platformdirs.unix import Unix
from platformdirs.windows import Windows

from sparsekit_fl.problem.datasets.files import cache_directory


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SPARSEKIT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "AppData" / "Local"))
    return tmp_path


@pytest.mark.parametrize(
    ("system", "place"),
    [(Unix, ".cache/sparsekit"), (MacOS, "Library/Caches/sparsekit"), (Windows, "AppData/Local/sparsekit/Cache")],
    ids=["Linux", "macOS", "Windows"],
)
def test_a_cache_lies_where_its_system_keeps_caches(
    system: type, place: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platformdirs, "PlatformDirs", system)
    # The registry and ctypes are there on Windows alone; the variables say the same.
    monkeypatch.setattr(windows, "get_win_folder", windows.get_win_folder_from_env_vars)
    found = Path(str(cache_directory()).replace("\\", "/"))
    assert found == home / place


def test_the_variable_of_ours_comes_first_on_every_system(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEKIT_CACHE", "~/mine")
    for system in (Unix, MacOS, Windows):
        monkeypatch.setattr(platformdirs, "PlatformDirs", system)
        assert cache_directory() == home / "mine"
