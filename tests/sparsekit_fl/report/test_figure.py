"""Curves: means over seeds at common rounds, and a picture that can be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparsekit.errors import DataError, InvalidValueError
from sparsekit_fl.report.curves import curves_of
from sparsekit_fl.report.figure import draw, main


def _result(method: str, seed: int, accuracies: dict[int, float]) -> dict[str, Any]:
    rounds = [
        {"round": r, "cost": {"flops_compact": 10**9 * r * (seed + 1)}, "evaluation": {"personal": {"accuracy": accuracy}}}
        for r, accuracy in accuracies.items()
    ]
    rounds.append({"round": 99, "cost": {"flops_compact": 0}, "evaluation": None})
    about = {"dataset": "digits", "model": "cnn", "clients": 20}
    return {"method": method, "seed": seed, "final": {}, "cost": {}, "rounds": rounds, "config": {"experiment": about}}


def test_seeds_become_a_mean_over_common_rounds() -> None:
    results = [_result("b", 0, {1: 0.2, 2: 0.4}), _result("a", 0, {2: 0.5}), _result("b", 1, {2: 0.6, 3: 0.9})]
    first, second = curves_of(results)
    assert (first.method, second.method) == ("b", "a")
    assert first.rounds.tolist() == [2]
    assert first.accuracy.tolist() == [0.5]
    assert first.flops.tolist() == [3e9]
    assert first.deviation.tolist() == pytest.approx([0.02**0.5])
    assert second.deviation.tolist() == [0]


def test_runs_without_a_common_round_are_refused() -> None:
    with pytest.raises(DataError, match="no scored round in common"):
        curves_of([_result("a", 0, {1: 0.5}), _result("a", 1, {2: 0.5})])


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="nothing to draw"):
        draw([], tmp_path / "x.png")


def test_the_command_draws_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for seed in (0, 1):
        (tmp_path / f"a{seed}").mkdir()
        (tmp_path / f"a{seed}/result.json").write_text(json.dumps(_result("a", seed, {1: 0.2, 2: 0.5 + seed / 10})))
    assert main([str(tmp_path / "x.png"), str(tmp_path / "a0"), str(tmp_path / "a1")]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_says_how_it_is_used(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err
    assert main([str(tmp_path / "x.png"), str(tmp_path)]) == 2
    assert "no result at" in capsys.readouterr().err
