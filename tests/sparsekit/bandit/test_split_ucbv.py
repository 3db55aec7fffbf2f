"""SplitUCBV as its users meet it: scale, boxes, costs, drift, and results."""

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsekit.bandit import field, split_ucbv, tree
from sparsekit.bandit.base import Box, Interval, Pull
from sparsekit.bandit.split_ucbv import SplitUCBV

UNIT = Interval(0.0, 1.0)
PLANE = Box({"lr": Interval(1e-4, 1.0, scale="log"), "width": Interval(16.0, 64.0)})


def play(bandit: Any, reward: Callable[[Any], float], pulls: int, *, seed: int = 0, noise: float = 0.1) -> list[Any]:
    draws, asked = np.random.default_rng(seed).normal(0.0, noise, pulls).tolist(), []
    for draw in draws:
        pull = bandit.ask()
        asked.append(pull.value)
        bandit.tell(pull, reward(pull.value) + draw)
    return asked


def hill(value: float) -> float:
    return -abs(value - 0.7)


def test_it_finds_the_top_of_a_box() -> None:
    apart = []

    def bowl(value: Any) -> float:
        x, y = PLANE.to_unit(value)
        return -((x - 0.3) ** 2) - (y - 0.6) ** 2

    for seed in range(5):
        bandit = SplitUCBV(PLANE, rng=np.random.default_rng(seed))
        asked = play(bandit, bowl, 150, seed=seed)
        assert all(value in PLANE for value in asked)
        x, y = PLANE.to_unit(bandit.best().value)
        apart.append(math.hypot(x - 0.3, y - 0.6))
    # A point 0.2 from the top loses less than half the noise of one reward.
    assert np.mean(apart) < 0.15


@pytest.mark.parametrize("power", [-40, 40])
def test_scaling_all_rewards_changes_no_proposal(power: int) -> None:
    # A power of two scales floats without rounding, so nothing at all may change.
    scale = 2.0**power
    once, scaled = (SplitUCBV(UNIT, rng=np.random.default_rng(1)) for _ in range(2))
    for step in range(80):
        pull, other = once.ask(), scaled.ask()
        assert pull == other
        reward = hill(pull.value) + 0.1 * math.sin(17.0 * step)
        once.tell(pull, reward)
        scaled.tell(other, scale * reward)


def test_gain_per_cost_is_maximized() -> None:
    bandit = SplitUCBV(UNIT, rng=np.random.default_rng(0))
    for draw in np.random.default_rng(0).normal(0.0, 0.05, 250).tolist():
        pull = bandit.ask()
        # Gain grows to the end; gain per cost is largest at 0.5.
        cost = 0.25 + pull.value**2
        bandit.tell(pull, pull.value + draw, cost=cost)
    assert bandit.best().value == pytest.approx(0.5, abs=0.15)


def test_a_bound_and_what_was_dropped_are_heeded() -> None:
    bounded, halved = (SplitUCBV(UNIT, rng=np.random.default_rng(0)) for _ in range(2))
    for draw in np.random.default_rng(0).normal(0.0, 0.1, 300):
        pull = bounded.ask(upper=0.4)
        assert pull.value <= 0.4
        bounded.tell(pull, hill(pull.value) + draw)
    pull = halved.ask()
    halved.tell(Pull(pull.id, 0.5), 0.0, eliminate="below")
    low = max(high for high in halved._field.high[: halved._field.size, 0] if high < 0.5)
    assert not any(low <= value < 0.5 for value in play(halved, hill, 400))


@pytest.mark.parametrize("places", [1, 4])
def test_a_proposal_that_is_executed_elsewhere_is_not_made_for_ever(places: int) -> None:
    for seed in range(4):
        bandit, draws = SplitUCBV(UNIT, rng=np.random.default_rng(seed)), np.random.default_rng(100 + seed)
        asked = []
        for draw in draws.normal(0.0, 0.1, 200).tolist():
            pull = bandit.ask()
            asked.append(pull.value)
            rounded = round(pull.value * places) / places
            bandit.tell(replace(pull, value=rounded), hill(rounded) + draw)
        assert max(map(asked.count, asked)) <= 40


def test_rewards_of_0_and_1_are_not_taken_for_exact() -> None:
    """Points are tried again, so that the noise is found out: whatever the seed, and as a rule most of the time."""
    tried = []
    for seed in range(10):
        bandit = SplitUCBV(UNIT, rng=np.random.default_rng(seed))
        asked, draws = [], np.random.default_rng(seed + 2).random(600).tolist()
        for draw in draws:
            pull = bandit.ask()
            asked.append(pull.value)
            bandit.tell(pull, float(draw < 0.9 - abs(pull.value - 0.7)))
        tried.append(len(set(asked)))
        assert abs(bandit.best().value - 0.7) < 0.2
    assert max(tried) <= 480, "a fifth of the pulls are of points tried before"
    assert np.median(tried) < 100


def test_a_state_resumes_to_the_same_bits_in_a_box_with_costs_and_open_pulls() -> None:
    bandit = SplitUCBV(PLANE, rng=np.random.default_rng(0))
    rng = np.random.default_rng(1)
    for _ in range(200):
        pull = bandit.ask()
        executed = {"lr": float(10.0 ** rng.uniform(-4, 0)), "width": float(rng.uniform(16, 64))}
        bandit.tell(Pull(pull.id, executed), float(rng.normal()), cost=float(rng.uniform(0.5, 2.0)))
    pending = [bandit.ask() for _ in range(3)]
    text = json.dumps(bandit.state_dict(), allow_nan=False)
    resumed = SplitUCBV(PLANE, rng=np.random.default_rng(9))
    resumed.load_state_dict(json.loads(text))
    assert json.dumps(resumed.state_dict(), allow_nan=False) == text
    for each in (bandit, resumed):
        each.tell(pending[1], 0.5)
    assert play(bandit, lambda _: 1.0, 40) == play(resumed, lambda _: 1.0, 40)
    assert bandit.best() == resumed.best()


@given(
    seed=st.integers(0, 2**16),
    discount=st.sampled_from([None, 1.0, 0.9]),
    steps=st.lists(st.sampled_from(["tell", "leave open", "elsewhere", "eliminate", "fall", "costly"]), max_size=60),
)
@settings(max_examples=60, deadline=None)
def test_what_is_remembered_of_the_index_is_what_would_be_computed(seed: int, discount: float | None, steps: list[str]) -> None:
    bandit = SplitUCBV(UNIT, rng=np.random.default_rng(seed), discount=discount)
    rng = np.random.default_rng(seed)
    for step in steps:
        pull = bandit.ask()
        if step == "leave open":
            continue
        executed = Pull(pull.id, float(rng.random())) if step == "elsewhere" else pull
        reward = hill(executed.value) + float(rng.normal(0.0, 0.1)) - 3.0 * (step == "fall")
        bandit.tell(executed, reward, cost=2.0 if step == "costly" else 1.0, eliminate="above" if step == "eliminate" else None)
        forgetful = copy.deepcopy(bandit)
        forgetful._field._index = None
        assert np.array_equal(forgetful._field.indices({}), bandit._field.indices({}))
        assert forgetful.ask() == copy.deepcopy(bandit).ask()


def test_the_page_of_constants_names_each_with_its_value() -> None:
    page = (Path(__file__).parents[3] / "docs" / "concepts" / "bandit-constants.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `")]
    told = {name: value for names, values in rows for name, value in zip(names.split(", "), values.split(", "), strict=True)}
    told = {name.strip(" `"): float(value) for name, value in told.items()}
    found: dict[str, float] = {}
    for module in (field, split_ucbv, tree):
        found |= {n: v for n, v in vars(module).items() if n.strip("_").isupper() and isinstance(v, int | float)}
    assert told == found
