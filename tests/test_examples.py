"""Every example runs to its end and prints what it promises."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent / "examples"


def _load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {"new_method", "own_data", "tune_lr", "wrap_module"}


def test_wrap_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = _load("wrap_module", monkeypatch)
    monkeypatch.setattr(example, "EPOCHS", 4)
    example.main()
    out = capsys.readouterr().out
    accuracy, density, gap = (
        float(re.search(pattern, out).group(1))  # type: ignore[union-attr]
        for pattern in (r"accuracy ([\d.]+)%", r"kept ([\d.]+)%", r"at most ([\d.e+-]+)")
    )
    assert accuracy > 95
    assert density < 10
    assert gap < 1e-4
    assert "times faster" in out


def test_own_data(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _load("own_data", monkeypatch).main()
    out = capsys.readouterr().out
    scores = {name: float(share) for name, share in re.findall(r"^(\w+) +accuracy ([\d.]+)%", out, re.M)}
    assert set(scores) == {"fedlps", "fedavg"}
    assert scores["fedlps"] > 80


def test_new_method(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = _load("new_method", monkeypatch)
    monkeypatch.setattr(example, "ROUNDS", 3)
    example.main()
    out = capsys.readouterr().out
    flops = {name: float(count) for name, count in re.findall(r"^(\w+) .* at ([\d.]+) GFLOPs", out, re.M)}
    assert flops["fedhalf"] < flops["fedavg"]


def test_tune_lr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = _load("tune_lr", monkeypatch)
    monkeypatch.setattr(example, "PULLS", 15)
    example.main()
    out = capsys.readouterr().out
    assert "best learning rate after 15 pulls" in out
    found = re.search(r"([\d.]+)% +<- P-UCBV", out)
    assert found is not None
    assert float(found.group(1)) > 85
