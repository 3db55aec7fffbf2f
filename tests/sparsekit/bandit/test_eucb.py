"""E-UCB: traces computed by hand."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsekit.bandit import EUCB, Arm, Interval

UNIT = Interval(0.0, 1.0)


def build(space: Interval = UNIT, *, seed: int = 0, **options: Any) -> EUCB:
    return EUCB(space, rng=np.random.default_rng(seed), **options)


def execute(bandit: EUCB, value: float, reward: float) -> None:
    bandit.tell(replace(bandit.ask(), value=value), reward)


def test_a_part_keeps_the_rewards_that_were_pulled_within_it() -> None:
    bandit = build(min_width=0.0)
    execute(bandit, 0.5, 1.0)
    assert bandit.arms == (Arm(0.0, 0.5), Arm(0.5, 1.0, 1, 1.0, 0.0))
    execute(bandit, 0.75, 3.0)
    execute(bandit, 0.8, 5.0)
    assert bandit.arms == (Arm(0.0, 0.5), Arm(0.5, 0.75, 1, 1.0), Arm(0.75, 0.8, 1, 3.0), Arm(0.8, 1.0, 1, 5.0))


def test_the_indices_of_a_trace() -> None:
    bandit = build(arms=2, discount=0.5, exploration=2.0, min_width=0.5)
    assert bandit.indices() == (math.inf, math.inf)
    for value, reward in ((0.1, 1.0), (0.2, 0.5), (0.7, 0.25)):
        execute(bandit, value, reward)
    low, high, total = 0.25 + 0.5, 1.0, 1.75
    assert bandit.indices() == pytest.approx(
        [
            (0.25 * 1.0 + 0.5 * 0.5) / low + 2.0 * math.sqrt(2 * math.log(total) / low),
            0.25 + 2.0 * math.sqrt(2 * math.log(total) / high),
        ],
        rel=1e-14,
    )


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(-5.0, 5.0)), max_size=30),
    width=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 9),
)
def test_every_reward_is_in_one_arm_and_the_arms_cover_the_space(
    steps: list[tuple[float, float]], width: float, seed: int
) -> None:
    space = Interval(1e-3, 10.0, "log")
    bandit = build(space, seed=seed, min_width=width)
    for share, reward in steps:
        execute(bandit, space.from_unit(share), reward)
    arms = bandit.arms
    assert sum(arm.pulls for arm in arms) == len(steps)
    assert [arms[0].low, arms[-1].high] == [space.low, space.high]
    assert all(a.high == b.low for a, b in pairwise(arms))
    assert min(space.to_unit(arm.high) - space.to_unit(arm.low) for arm in arms) >= width - 1e-12
    counts, _ = bandit._sums()
    assert [bool(count) for count in counts] == [bool(arm.pulls) for arm in arms]
