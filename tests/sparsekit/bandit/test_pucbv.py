"""P-UCBV: traces computed by hand, invariants under random use, and the contract of every bandit."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsekit.bandit import PUCBV, Arm, Interval, Pull
from sparsekit.testing.bandits import BanditContract, MakeBandit

Drop = Literal["below", "above"] | None
UNIT = Interval(0.0, 1.0)


def build(space: Interval = UNIT, *, horizon: float | None = 10, seed: int = 0, **options: Any) -> PUCBV:
    return PUCBV(space, horizon=horizon, rng=np.random.default_rng(seed), **options)


def execute(bandit: PUCBV, value: float, reward: float, drop: Drop = None) -> None:
    bandit.tell(replace(bandit.ask(), value=value), reward, drop=drop)


def near(value: float, rel: float | None = None) -> Any:
    return pytest.approx(value, rel=rel)


def edges(bandit: PUCBV) -> list[tuple[float, float]]:
    return [(arm.low, arm.high) for arm in bandit.arms]


class TestPUCBVContract(BanditContract):
    @pytest.fixture
    def make(self) -> MakeBandit:
        return lambda space, rng: PUCBV(space, horizon=100, rng=rng)


# --- traces ---


def test_a_reward_splits_the_arm_and_both_parts_inherit() -> None:
    bandit = build(arms=2)
    execute(bandit, 0.25, 1.0)
    assert bandit.arms == (Arm(0.0, 0.25, 1, 1.0, 0.0), Arm(0.25, 0.5, 1, 1.0, 0.0), Arm(0.5, 1.0))
    execute(bandit, 0.375, 3.0)
    assert bandit.arms == (
        Arm(0.0, 0.25, 1, 1.0, 0.0),
        Arm(0.25, 0.375, 2, 2.0, 1.0),
        Arm(0.375, 0.5, 2, 2.0, 1.0),
        Arm(0.5, 1.0),
    )
    execute(bandit, 0.375, 5.0)  # at the edge: the upper arm holds it, and cannot be split there
    assert bandit.arms[2] == Arm(0.375, 0.5, 3, 3.0, near(8 / 3))
    assert len(bandit.arms) == 4


def test_the_indices_of_a_trace() -> None:
    bandit = build(arms=2, exploration=0.5)
    start = 2 * math.log(10 / 2)  # before any reward: xi = 10, psi = 10/4, epsilon = 1
    assert bandit.indices() == pytest.approx([math.sqrt(0.5 * 2 * start / 4)] * 2, rel=1e-14)
    execute(bandit, 0.25, 1.0)
    log = math.log(10 * (10 / 9) * 0.5)  # three arms, epsilon = 1/2
    parent, fresh = 1.0 + math.sqrt(0.5 * 2 * log / (4 * 2)), math.sqrt(0.5 * 2 * log / 4)
    assert bandit.indices() == pytest.approx([parent, parent, fresh], rel=1e-14)
    execute(bandit, 0.375, 3.0)
    log = math.log(10 * (10 / 16) * 0.25)
    assert bandit.indices() == pytest.approx(
        [
            1.0 + math.sqrt(0.5 * 2 * log / (4 * 2)),
            2.0 + math.sqrt(0.5 * 3 * log / (4 * 3)),
            2.0 + math.sqrt(0.5 * 3 * log / (4 * 3)),
            math.sqrt(0.5 * 2 * log / 4),
        ],
        rel=1e-14,
    )


def test_where_the_logarithm_is_negative_the_index_is_the_mean() -> None:
    bandit = build(arms=5)
    for value, reward in ((0.1, 1.0), (0.3, 2.0), (0.5, 6.0)):
        execute(bandit, value, reward)
    assert len(bandit.arms) == 8
    assert math.log(10 * (10 / 64) / 8) < 0
    assert bandit.indices() == (1.0, 1.0, 2.0, 2.0, 6.0, 6.0, 0.0, 0.0)
    assert 0.4 <= bandit.ask().value < 0.5  # the lower of the two parts that tie


def test_without_decay_exploration_goes_on() -> None:
    bandit = build(arms=1, decay=1.0, horizon=1000, min_width=1.0)
    for _ in range(50):
        execute(bandit, 0.5, 0.0)
    assert bandit.indices() == pytest.approx([math.sqrt(2 * 2 * math.log(1000) / (4 * 51))], rel=1e-14)


def test_a_long_run_does_not_underflow() -> None:
    bandit = build(arms=1, min_width=1.0)
    for _ in range(1200):
        execute(bandit, 0.5, 0.25)
    assert bandit.indices() == (0.25,)


def test_rewards_of_large_mean_keep_their_variance() -> None:
    bandit = build(arms=1, min_width=1.0)
    for reward in (1e9, 1e9 + 1, 1e9 + 2):
        execute(bandit, 0.5, reward)
    assert bandit.arms == (Arm(0.0, 1.0, 3, 1e9 + 1, near(2 / 3)),)


def test_dropping_takes_one_side_away() -> None:
    below, above = build(arms=2), build(arms=2)
    execute(below, 0.25, -1.0, drop="below")
    execute(above, 0.25, -1.0, drop="above")
    assert below.arms == (Arm(0.25, 0.5, 1, -1.0, 0.0), Arm(0.5, 1.0))
    assert above.arms == (Arm(0.0, 0.25, 1, -1.0, 0.0), Arm(0.5, 1.0))


def test_the_first_arm_is_drawn_at_random_and_evenly() -> None:
    counts = [0] * 5
    for seed in range(500):
        counts[int(build(seed=seed).ask().value * 5)] += 1
    assert min(counts) > 70
    assert max(counts) < 130
    bounded = {int(build(seed=seed).ask(upper=0.55).value * 5) for seed in range(50)}
    assert bounded == {0, 1, 2}


def test_after_the_first_reward_ties_go_to_the_lowest_arm() -> None:
    bandit = build(arms=4, exploration=0.0)
    execute(bandit, 0.9, 0.0)
    assert all(bandit.ask().value < 0.25 for _ in range(20))


# --- bounds ---


def test_where_all_below_the_bound_is_dropped_the_bound_itself_is_proposed() -> None:
    bandit = build(arms=1)
    execute(bandit, 0.5, -1.0, drop="below")
    pull = bandit.ask(upper=0.25)
    assert pull.value == 0.25
    bandit.tell(pull, -3.0, drop="above")
    assert bandit.arms == (Arm(0.5, 1.0, 2, -2.0, 1.0),)


def test_a_value_between_arms_is_credited_to_the_nearest() -> None:
    bandit = build(arms=2)
    execute(bandit, 0.25, 0.0, drop="above")
    assert edges(bandit) == [(0.0, 0.25), (0.5, 1.0)]
    execute(bandit, 0.3, 1.0)
    execute(bandit, 0.45, 2.0)
    execute(bandit, 0.375, 5.0)  # as far from both
    assert bandit.arms == (Arm(0.0, 0.25, 3, 2.0, near(14 / 3)), Arm(0.5, 1.0, 1, 2.0, 0.0))


def test_the_end_of_the_space_belongs_to_the_last_arm_until_it_is_dropped() -> None:
    bandit = build(arms=2)
    execute(bandit, 1.0, 2.0, drop="below")
    assert bandit.arms == (Arm(0.0, 0.5), Arm(0.5, 1.0, 1, 2.0, 0.0))
    execute(bandit, 0.75, 2.0, drop="above")
    execute(bandit, 1.0, 5.0)
    assert bandit.arms[-1] == Arm(0.5, 0.75, 3, 3.0, 2.0)


def test_a_part_that_would_be_too_narrow_is_not_split_off() -> None:
    bandit = build(arms=1, min_width=0.25)
    for value in (0.2, 0.8):
        execute(bandit, value, 1.0, drop="below")
    assert bandit.arms == (Arm(0.0, 1.0, 2, 1.0, 0.0),)
    execute(bandit, 0.25, 1.0)
    assert edges(bandit) == [(0.0, 0.25), (0.25, 1.0)]
    log = build(Interval(1.0, 1e4, "log"), arms=1, min_width=0.25)
    execute(log, 9.0, 0.0)
    assert len(log.arms) == 1
    execute(log, 11.0, 0.0)
    assert edges(log) == [(1.0, 11.0), (11.0, 1e4)]


# --- best ---


def test_best_does_not_lie_where_values_were_dropped() -> None:
    bandit = build(arms=2)
    execute(bandit, 0.25, 9.0)
    execute(bandit, 0.125, 0.0, drop="above")
    execute(bandit, 0.75, 1.0)
    assert bandit.best() == Pull(0, 0.25)
    left = build(arms=2)
    execute(left, 0.25, 5.0, drop="above")
    execute(left, 0.125, 4.0)
    assert left.best() == Pull(1, 0.125)
    alone = build(arms=1)
    execute(alone, 0.5, 1.0, drop="above")
    assert alone.best() == Pull(0, 0.5)


# --- invariants ---

STEP = st.tuples(
    st.floats(0.0, 1.0),  # the bound of the proposal, as a share
    st.none() | st.floats(0.0, 1.0),  # the executed value, as a share; None: the proposal
    st.floats(-100.0, 100.0),
    st.sampled_from([None, "below", "above"]),
)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(STEP, max_size=25),
    space=st.sampled_from([UNIT, Interval(0.0625, 1.0), Interval(1e-4, 10.0, "log"), Interval(-3.0, 5.0)]),
    arms=st.integers(1, 7),
    min_width=st.sampled_from([0.0, 1e-3, 0.1]),
    seed=st.integers(0, 99),
)
def test_arms_and_proposals_keep_their_invariants(
    steps: list[tuple[float, float | None, float, Drop]], space: Interval, arms: int, min_width: float, seed: int
) -> None:
    bandit = build(space, arms=arms, min_width=min_width, seed=seed)
    gone = 0.0
    for share, executed, reward, drop in steps:
        upper = space.from_unit(share)
        pull = bandit.ask(upper=upper)
        assert space.low <= pull.value <= upper
        value = pull.value if executed is None else space.from_unit(executed)
        before = bandit.arms
        bandit.tell(replace(pull, value=value), reward, drop=drop)
        after = bandit.arms

        held = [arm for arm in before if arm.low <= value < arm.high or value == arm.high == space.high]
        changed = [arm for arm in after if arm not in before]
        assert len(held) <= 1
        assert 1 <= len(changed) <= 2
        if held:
            parent = held[0]
            assert all(arm.pulls == parent.pulls + 1 for arm in changed)
            assert all(replace(changed[0], low=arm.low, high=arm.high) == arm for arm in changed)
            if len(changed) == 2:
                assert drop is None
                assert [(arm.low, arm.high) for arm in changed] == [(parent.low, value), (value, parent.high)]
            elif (changed[0].low, changed[0].high) != (parent.low, parent.high):
                expected = (value, parent.high) if drop == "below" else (parent.low, value)
                assert drop is not None
                assert (changed[0].low, changed[0].high) == expected
                gone += space.to_unit(parent.high) - space.to_unit(parent.low)
                gone -= space.to_unit(changed[0].high) - space.to_unit(changed[0].low)
        else:
            assert len(after) == len(before)
        assert space.low <= after[0].low
        assert after[-1].high <= space.high
        assert all(arm.low < arm.high for arm in after)
        assert all(a.high <= b.low for a, b in pairwise(after))
        widths = [space.to_unit(arm.high) - space.to_unit(arm.low) for arm in after]
        assert sum(widths) + gone == pytest.approx(1.0, abs=1e-9)
        assert min(widths) >= min_width - 1e-12
        assert all(arm.variance >= 0.0 and abs(arm.mean) <= 100.0 + 1e-9 for arm in after)
        assert bandit.best().value in space
    resumed = build(space, arms=arms, min_width=min_width)
    resumed.load_state_dict(json.loads(json.dumps(bandit.state_dict(), allow_nan=False)))
    assert resumed.arms == bandit.arms
    assert [resumed.ask() for _ in range(3)] == [bandit.ask() for _ in range(3)]


def test_epsilon_decays_with_the_rewards_of_this_bandit_and_not_with_its_proposals() -> None:
    bandit = build(arms=2, exploration=0.5)
    before = bandit.indices()
    for _ in range(20):
        bandit.ask()
    assert bandit.indices() == before
    execute(bandit, 0.25, 0.0)
    assert bandit.indices()[2] == near(math.sqrt(0.5 * 2 * math.log(10 * (10 / 9) / 2) / 4), rel=1e-14)


def test_with_an_unknown_horizon_exploration_comes_back_as_the_run_doubles() -> None:
    bandit = build(horizon=None, arms=1, min_width=1.0)

    def log_after(told: int) -> float:
        while len(bandit.told) < told:
            execute(bandit, 0.5, 0.0)
        return 4 * (told + 1) * bandit.indices()[0] ** 2 / 2

    assert log_after(0) == near(math.log(2 * 2), rel=1e-12)
    assert log_after(1) == near(math.log(2 * 2 / 2), rel=1e-12)
    assert log_after(2) == near(math.log(4 * 4), rel=1e-12)
    assert log_after(3) == near(math.log(4 * 4 / 2), rel=1e-12)
    assert log_after(4) == near(math.log(8 * 8), rel=1e-12)
    assert log_after(7) == near(math.log(8 * 8 / 8), rel=1e-12)
    assert log_after(63) == 0.0  # 32 rewards later
    assert log_after(64) == near(math.log(128 * 128), rel=1e-9)


def test_a_floor_keeps_epsilon_up() -> None:
    bandit = build(arms=1, min_width=1.0, horizon=100, floor=0.125)
    for told in range(6):
        log = math.log(100 * 100 * max(0.5**told, 0.125))
        assert bandit.indices() == (near(math.sqrt(2 * log / (4 * (told + 1))), rel=1e-14),)
        execute(bandit, 0.5, 0.0)


def test_open_pulls_are_credited_to_the_arms_that_stand_when_they_are_told() -> None:
    bandit = build(arms=1)
    first, second, third = (bandit.ask() for _ in range(3))
    bandit.tell(replace(second, value=0.5), 1.0)
    bandit.tell(replace(first, value=0.25), 3.0)
    bandit.tell(replace(third, value=0.375), 5.0, drop="above")
    assert bandit.arms == (
        Arm(0.0, 0.25, 2, 2.0, 1.0),
        Arm(0.25, 0.375, 3, 3.0, near(8 / 3)),
        Arm(0.5, 1.0, 1, 1.0, 0.0),
    )
