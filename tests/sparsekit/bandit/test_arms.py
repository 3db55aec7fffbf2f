"""P-UCBV by traces worked out by hand, SplitUCBV as its users meet it, and invariants under random use."""

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsekit.bandit import PUCBV, Arm, Interval, Pull, field, split_ucbv, tree
from sparsekit.bandit.base import Box
from sparsekit.bandit.split_ucbv import SplitUCBV

Side = Literal["below", "above"] | None
UNIT = Interval(0.0, 1.0)


def build(space: Interval = UNIT, *, horizon: float | None = 10, seed: int = 0, **options: Any) -> PUCBV:
    return PUCBV(space, horizon=horizon, rng=np.random.default_rng(seed), **options)


def execute(bandit: PUCBV, value: float, reward: float, eliminate: Side = None) -> None:
    bandit.tell(replace(bandit.ask(), value=value), reward, eliminate=eliminate)


near = pytest.approx

TRACES: dict[str, tuple[dict[str, Any], list[tuple[Any, ...]], tuple[Arm, ...]]] = {
    "a reward splits its arm, and both parts inherit": (
        {"arms": 2}, [(0.25, 1.0), (0.375, 3.0)],
        (Arm(0.0, 0.25, 1, 1.0), Arm(0.25, 0.375, 2, 2.0, 1.0), Arm(0.375, 0.5, 2, 2.0, 1.0), Arm(0.5, 1.0)),
    ),
    "an edge belongs to the upper arm, which cannot be split there": (
        {"arms": 2}, [(0.25, 1.0), (0.375, 3.0), (0.375, 5.0)],
        (Arm(0.0, 0.25, 1, 1.0), Arm(0.25, 0.375, 2, 2.0, 1.0), Arm(0.375, 0.5, 3, 3.0, near(8 / 3)), Arm(0.5, 1.0)),
    ),
    "rewards of large mean keep their variance": (
        {"arms": 1, "min_width": 1.0}, [(0.5, 1e9), (0.5, 1e9 + 1), (0.5, 1e9 + 2)], (Arm(0.0, 1.0, 3, 1e9 + 1, near(2 / 3)),),
    ),
    "what lies below is dropped": ({"arms": 2}, [(0.25, -1.0, "below")], (Arm(0.25, 0.5, 1, -1.0), Arm(0.5, 1.0))),
    "what lies above is dropped": ({"arms": 2}, [(0.25, -1.0, "above")], (Arm(0.0, 0.25, 1, -1.0), Arm(0.5, 1.0))),
    "a value between arms is credited to the nearest, of two to the lower": (
        {"arms": 2}, [(0.25, 0.0, "above"), (0.3, 1.0), (0.45, 2.0), (0.375, 5.0)],
        (Arm(0.0, 0.25, 3, 2.0, near(14 / 3)), Arm(0.5, 1.0, 1, 2.0)),
    ),
    "the end of the space belongs to the last arm": (
        {"arms": 2}, [(1.0, 2.0, "below")], (Arm(0.0, 0.5), Arm(0.5, 1.0, 1, 2.0))
    ),
    "also where the end was dropped": (
        {"arms": 2}, [(1.0, 2.0, "below"), (0.75, 2.0, "above"), (1.0, 5.0)], (Arm(0.0, 0.5), Arm(0.5, 0.75, 3, 3.0, 2.0))
    ),
    "no part is too narrow, and then nothing is dropped": (
        {"arms": 1, "min_width": 0.25}, [(0.2, 1.0, "below"), (0.8, 1.0, "below")], (Arm(0.0, 1.0, 2, 1.0),)
    ),
    "a part may be as narrow as allowed": (
        {"arms": 1, "min_width": 0.25}, [(0.25, 1.0)], (Arm(0.0, 0.25, 1, 1.0), Arm(0.25, 1.0, 1, 1.0))
    ),
    "widths are those on a log scale": (
        {"space": Interval(1.0, 1e4, "log"), "arms": 1, "min_width": 0.25}, [(9.0, 0.0), (11.0, 0.0)],
        (Arm(1.0, 11.0, 2), Arm(11.0, 1e4, 2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TRACES)
def test_the_arms_of_a_trace(case: str) -> None:
    options, steps, arms = TRACES[case]
    bandit = build(**options)
    for step in steps:
        execute(bandit, *step)
    assert bandit.arms == arms


def test_the_indices_of_a_trace() -> None:
    bandit = build(arms=2, exploration=0.5)
    for _ in range(20):  # epsilon decays with rewards, and not with proposals
        bandit.ask()
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


def test_the_first_arm_is_drawn_at_random_and_evenly() -> None:
    counts = [0] * 5
    for seed in range(500):
        counts[int(build(seed=seed).ask().value * 5)] += 1
    assert min(counts) > 70
    assert max(counts) < 130
    bounded = {int(build(seed=seed).ask(upper=0.55).value * 5) for seed in range(50)}
    assert bounded == {0, 1, 2}


def test_where_all_below_the_bound_is_dropped_the_bound_itself_is_proposed() -> None:
    bandit = build(arms=1)
    execute(bandit, 0.5, -1.0, eliminate="below")
    pull = bandit.ask(upper=0.25)
    assert pull.value == 0.25
    bandit.tell(pull, -3.0, eliminate="above")
    assert bandit.arms == (Arm(0.5, 1.0, 2, -2.0, 1.0),)


def test_an_arm_that_begins_at_the_bound_does_not_compete() -> None:
    bandit = build(arms=2)
    for value, reward in ((0.75, 9.0), (0.25, -9.0)):
        execute(bandit, value, reward)
    assert bandit.ask(upper=0.5).value < 0.5


@pytest.mark.parametrize(
    ("arms", "steps", "best"),
    [
        (2, [(0.25, 9.0), (0.125, 0.0, "above"), (0.75, 1.0)], Pull(0, 0.25)),
        (2, [(0.25, 5.0, "above"), (0.125, 4.0)], Pull(1, 0.125)),
        (1, [(0.5, 1.0, "above")], Pull(0, 0.5)),
    ],
)
def test_best_does_not_lie_where_values_were_dropped_unless_all_were(arms: int, steps: list[Any], best: Pull) -> None:
    bandit = build(arms=arms)
    for step in steps:
        execute(bandit, *step)
    assert bandit.best() == best


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
    steps: list[tuple[float, float | None, float, Side]], space: Interval, arms: int, min_width: float, seed: int
) -> None:
    bandit = build(space, arms=arms, min_width=min_width, seed=seed)
    gone = 0.0
    for share, executed, reward, eliminate in steps:
        upper = space.from_unit(share)
        pull = bandit.ask(upper=upper)
        assert space.low <= pull.value <= upper
        value = pull.value if executed is None else space.from_unit(executed)
        before = bandit.arms
        bandit.tell(replace(pull, value=value), reward, eliminate=eliminate)
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
                assert eliminate is None
                assert [(arm.low, arm.high) for arm in changed] == [(parent.low, value), (value, parent.high)]
            elif (changed[0].low, changed[0].high) != (parent.low, parent.high):
                expected = (value, parent.high) if eliminate == "below" else (parent.low, value)
                assert eliminate is not None
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
    resumed.load_state_dict(bandit.state_dict())
    assert resumed.arms == bandit.arms
    assert [resumed.ask() for _ in range(3)] == [bandit.ask() for _ in range(3)]


@pytest.mark.parametrize(
    ("options", "told", "growth"),
    [
        ({"horizon": 1000, "decay": 1.0}, 50, 1000 * 1000),
        ({"horizon": 10}, 1200, 1),  # and ε does not underflow
        *(({"horizon": 100}, told, 100 * 100 * 0.5**told) for told in range(6)),
        # An unknown horizon is the power of two above t, and ε counts from where it grew last.
        *(
            ({"horizon": None}, told, growth)
            for told, growth in ((0, 4), (1, 2), (2, 16), (3, 8), (4, 64), (7, 8), (63, 1), (64, 128 * 128))
        ),
    ],
)
def test_exploration_decays_and_comes_back_as_an_unknown_horizon_doubles(
    options: dict[str, Any], told: int, growth: float
) -> None:
    bandit = build(arms=1, min_width=1.0, **options)
    for _ in range(told):
        execute(bandit, 0.5, 0.25)
    mean = 0.25 if told else 0.0
    assert bandit.indices() == (near(mean + math.sqrt(2 * math.log(growth) / (4 * (told + 1))), rel=1e-12),)


BOTH = Box({"x": UNIT, "y": UNIT})
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


def test_a_bound_is_heeded() -> None:
    bounded = SplitUCBV(UNIT, rng=np.random.default_rng(0))
    for draw in np.random.default_rng(0).normal(0.0, 0.1, 300):
        pull = bounded.ask(upper=0.4)
        assert pull.value <= 0.4
        bounded.tell(pull, hill(pull.value) + draw)


FAILING: dict[str, Callable[[float, float], float | None]] = {
    "diagonal": lambda x, y: None if x + y > 1.2 else x + y - 0.5 * (x - 0.5) ** 2,
    "steep": lambda x, y: None if 2 * x + y > 1.5 else x + 0.7 * y,
    "axis": lambda x, y: None if x > 0.7 else x - (y - 0.4) ** 2,
    "circle": lambda x, y: None if math.hypot(x - 0.2, y - 0.3) > 0.6 else math.hypot(x - 0.2, y - 0.3) - 0.3 * (x - y) ** 2,
}


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("name", FAILING)
def test_beside_a_region_that_fails_it_is_never_worse_than_random(name: str, noise: float) -> None:
    marks, seeds, value = (200, 500), 3, FAILING[name]
    found = {mark: [0.0, 0.0] for mark in marks}
    for seed in range(seeds):
        bandit, draws = SplitUCBV(BOTH, rng=np.random.default_rng(seed)), np.random.default_rng(100 + seed)
        drawn: list[tuple[float, float]] = []  # what random search sees, and what it is worth
        for place, point in enumerate(draws.random((marks[-1], 2)).tolist(), 1):
            pull, error = bandit.ask(), noise * float(draws.normal())
            if (reward := value(*pull.value.values())) is None:
                bandit.forget(pull)
            else:
                bandit.tell(pull, reward + error)
            if (reward := value(*point)) is not None:
                drawn.append((reward + error, reward))
            if place in marks:
                found[place][0] += (value(*bandit.best().value.values()) or -math.inf) / seeds
                found[place][1] += max(drawn)[1] / seeds
    assert all(ours >= random for ours, random in found.values()), found


@pytest.mark.parametrize("edge", [0.8, 0.6, 0.4])
def test_a_wide_region_that_diverges_misleads_no_more_than_one_that_fails(edge: float) -> None:
    """At most 0.02 from the top of a range of 2, also where most of the interval diverges."""
    for large in (1e2, 1e4, 1e8):
        regrets = []
        for seed in range(5):
            bandit, draws = SplitUCBV(UNIT, rng=np.random.default_rng(seed)), np.random.default_rng(100 + seed)
            for draw in draws.normal(0.0, 0.02, 80).tolist():
                pull = bandit.ask()
                bandit.tell(pull, (-large if pull.value > edge else -2.0 * abs(pull.value - 0.3)) + draw)
            regrets.append(2.0 * abs(bandit.best().value - 0.3))
            assert bandit.best().value <= edge
        assert np.mean(regrets) < 0.02


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


def test_a_state_resumes_to_the_same_bits_in_a_box_with_failures_and_open_pulls() -> None:
    bandit = SplitUCBV(PLANE, rng=np.random.default_rng(0))
    rng = np.random.default_rng(1)
    for _ in range(200):
        pull = bandit.ask()
        executed = {"lr": float(10.0 ** rng.uniform(-4, 0)), "width": float(rng.uniform(16, 64))}
        if rng.random() < 0.2:
            bandit.forget(Pull(pull.id, executed))
        else:
            bandit.tell(Pull(pull.id, executed), float(rng.normal()) - 1e6 * (rng.random() < 0.2))
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
    steps=st.lists(st.sampled_from(["tell", "leave open", "elsewhere", "fall", "fail", "diverge"]), max_size=60),
)
@settings(max_examples=60, deadline=None)
def test_what_is_remembered_of_the_index_is_what_would_be_computed(seed: int, steps: list[str]) -> None:
    bandit = SplitUCBV(UNIT, rng=np.random.default_rng(seed))
    rng = np.random.default_rng(seed)
    for step in steps:
        pull = bandit.ask()
        if step == "leave open":
            continue
        executed = Pull(pull.id, float(rng.random())) if step == "elsewhere" else pull
        reward = hill(executed.value) + float(rng.normal(0.0, 0.1)) - {"fall": 3.0, "diverge": 1e9}.get(step, 0.0)
        bandit.forget(executed) if step == "fail" else bandit.tell(executed, reward)
        forgetful = copy.deepcopy(bandit)
        forgetful._field._index = None
        assert np.array_equal(forgetful._field.indices({}), bandit._field.indices({}))
        assert forgetful.ask() == copy.deepcopy(bandit).ask()


def test_the_page_of_constants_names_each_with_its_value() -> None:
    page = (Path(__file__).parents[3] / "results" / "bandit-constants.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `")]
    told = {name: value for names, values in rows for name, value in zip(names.split(", "), values.split(", "), strict=True)}
    told = {name.strip(" `"): float(value) for name, value in told.items()}
    found: dict[str, float] = {}
    for module in (field, split_ucbv, tree):
        found |= {n: v for n, v in vars(module).items() if n.strip("_").isupper() and isinstance(v, int | float)}
    assert told == found
