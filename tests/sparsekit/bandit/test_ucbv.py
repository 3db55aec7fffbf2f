"""UCB-V on a grid: traces computed by hand, and the contract of every bandit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sparsekit.bandit import UCBV, Arm, Interval, Pull
from sparsekit.testing.bandits import BanditContract, MakeBandit

UNIT = Interval(0.0, 1.0)


def build(space: Interval = UNIT, *, seed: int = 0, **options: Any) -> UCBV:
    return UCBV(space, rng=np.random.default_rng(seed), **options)


def execute(bandit: UCBV, value: float, reward: float) -> None:
    bandit.tell(replace(bandit.ask(), value=value), reward)


class TestUCBVContract(BanditContract):
    @pytest.fixture
    def make(self) -> MakeBandit:
        return lambda space, rng: UCBV(space, rng=rng)


def test_the_grid_is_even_on_the_scale_and_has_both_ends() -> None:
    assert [arm.low for arm in build(arms=3).arms] == [0.0, 0.5, 1.0]
    assert [arm.low for arm in build(Interval(1.0, 1e4, "log")).arms] == pytest.approx([1, 10, 100, 1000, 10000])


def test_every_point_is_tried_once_before_any_twice_and_in_random_order() -> None:
    bandit = build(arms=6)
    values = []
    for _ in range(6):
        values.append(bandit.ask().value)
        execute(bandit, values[-1], 0.0)
    assert sorted(values) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert len({build(arms=6, seed=seed).ask().value for seed in range(50)}) == 6


def test_open_points_are_not_proposed_while_others_are_new() -> None:
    bandit = build(arms=4)
    assert len({bandit.ask().value for _ in range(4)}) == 4
    assert bandit.ask().value in (0.0, 1 / 3, 2 / 3, 1.0)


def test_the_indices_of_a_trace() -> None:
    bandit = build(arms=2, exploration=0.5, reward_range=2.0)
    assert bandit.indices() == (math.inf, math.inf)
    for value, reward in ((0.0, 1.0), (0.0, 3.0), (1.0, 5.0)):
        execute(bandit, value, reward)
    log = 0.5 * math.log(3)
    assert bandit.indices() == pytest.approx(
        [2.0 + math.sqrt(2 * 1.0 * log / 2) + 3 * 2.0 * log / 2, 5.0 + 3 * 2.0 * log], rel=1e-14
    )


def test_a_value_between_points_is_credited_to_the_nearest_and_a_middle_to_the_lower() -> None:
    bandit = build(arms=3)
    for value, reward in ((0.25, 1.0), (0.26, 2.0), (0.75, 3.0), (0.9, 4.0)):
        execute(bandit, value, reward)
    assert bandit.arms == (Arm(0.0, 0.0, 1, 1.0), Arm(0.5, 0.5, 2, 2.5, 0.25), Arm(1.0, 1.0, 1, 4.0))
    assert bandit.best() == Pull(3, 0.9)


def test_with_a_bound_only_points_up_to_it_compete() -> None:
    bandit = build(arms=5)
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        execute(bandit, value, value)
    assert bandit.ask(upper=0.74).value == 0.5
    assert bandit.ask(upper=0.5).value == 0.5
    assert bandit.ask(upper=0.1).value == 0.0
    assert bandit.ask().value == 1.0


def test_a_forgotten_pull_is_new_again() -> None:
    bandit = build(arms=2)
    first, second = bandit.ask(), bandit.ask()
    bandit.forget(first)
    bandit.tell(second, 1.0)
    assert bandit.ask().value == first.value
