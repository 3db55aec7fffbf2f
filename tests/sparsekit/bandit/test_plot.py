"""Pictures of bandits: drawn from the bandit or its saved state, and what cannot be drawn is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsekit.bandit import PUCBV, Box, Interval, make_bandit, registry, restore_bandit
from sparsekit.errors import InvalidValueError, MissingDependencyError

pytest.importorskip("matplotlib")

from sparsekit.bandit.plot import save_plot


def played(name: str, pulls: int = 20, space: Any = None) -> Any:
    bandit = make_bandit(name, space or Interval(1e-4, 1.0, "log"), rng=np.random.default_rng(0), horizon=pulls)
    for place in range(pulls):
        pull = bandit.ask()
        bandit.tell(pull, -abs(np.log10(pull.value) + 2) - 0.01 * place)
    return bandit


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(registry))
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_every_bandit_is_drawn_and_its_saved_state_gives_the_same_file(name: str, kind: str, tmp_path: Path) -> None:
    bandit = played(name)
    save_plot(bandit, tmp_path / f"live.{kind}", metric="loss", minimize=True, name="learning rate")
    saved = json.loads(json.dumps(bandit.state_dict()))
    save_plot(saved, tmp_path / f"saved.{kind}", metric="loss", minimize=True, name="learning rate")
    drawn = (tmp_path / f"live.{kind}").read_bytes()
    assert drawn == (tmp_path / f"saved.{kind}").read_bytes()
    assert len(drawn) > 5000
    if kind == "svg":
        text = drawn.decode()
        words = (f"{type(bandit).__name__}, 20 pulls", ">loss<", ">learning rate<", ">recommended<")
        assert all(word in text for word in words)


@pytest.mark.parametrize("axes", [1, 2, 3, 5])
def test_a_box_is_drawn_along_each_of_its_intervals(axes: int, tmp_path: Path) -> None:
    space = Box({f"x{place}": Interval(1e-3, 1.0, "log" if place % 2 else "linear") for place in range(axes)})
    bandit = make_bandit("split-ucbv", space, rng=np.random.default_rng(0))
    for _ in range(12):
        pull = bandit.ask()
        bandit.tell(pull, -sum(abs(value - 0.3) for value in pull.value.values()))  # type: ignore[attr-defined]
    save_plot(json.loads(json.dumps(bandit.state_dict())), tmp_path / "box.svg", metric="gain")
    text = (tmp_path / "box.svg").read_text()
    assert all(f">x{place}<" in text for place in range(axes))
    assert text.count(">gain<") == axes + (axes == 2)


def test_one_pull_is_enough(tmp_path: Path) -> None:
    save_plot(played("p-ucbv", 1), tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 5000


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="nothing to draw"):
        save_plot(PUCBV(Interval(0.0, 1.0), rng=np.random.default_rng(0)), tmp_path / "a.png")
    with pytest.raises(InvalidValueError, match=r"must end in .png, .svg, .pdf, got '.*a.jpeg'"):
        save_plot(played("p-ucbv"), tmp_path / "a.jpeg")
    with pytest.raises(InvalidValueError, match="not a bandit's state"):
        save_plot({}, tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"sparsekit-torch\[report\]"):
        save_plot(played("p-ucbv"), tmp_path / "a.png")


@pytest.mark.parametrize("name", sorted(registry))
def test_a_bandit_is_restored_from_its_state_alone(name: str) -> None:
    bandit = played(name)
    again = restore_bandit(json.loads(json.dumps(bandit.state_dict())))
    assert type(again) is type(bandit)
    assert [again.ask() for _ in range(3)] == [bandit.ask() for _ in range(3)]


def test_a_state_of_no_bandit_is_refused() -> None:
    state = played("p-ucbv").state_dict()
    for broken in ({"settings": 3}, {"settings": {}}, {"settings": {"space": {"low": 1}}}):
        with pytest.raises(InvalidValueError, match="not a bandit's state"):
            restore_bandit(broken)
    with pytest.raises(InvalidValueError, match="no bandit has the settings colour"):
        restore_bandit({"settings": {"space": {"low": 0.0, "high": 1.0}, "colour": 1}})
    with pytest.raises(InvalidValueError, match="not a state of PUCBV"):
        restore_bandit({**state, "arms": None})
