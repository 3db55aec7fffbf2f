"""BanditContract: inherit it and supply one fixture to test a bandit that was written elsewhere."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from sparsekit.bandit.base import Bandit, Interval, Pull
from sparsekit.errors import InvalidValueError

__all__ = ["BanditContract", "MakeBandit"]

MakeBandit = Callable[[Interval, np.random.Generator], Bandit]
"""Builds a fresh bandit over an interval that draws from the given generator."""

LINEAR = Interval(0.0625, 1.0)
LOG = Interval(1e-4, 10.0, scale="log")


def _hill(space: Interval, value: float) -> float:
    return -abs(space.to_unit(value) - 0.7)


def _play(bandit: Bandit, space: Interval, pulls: int) -> list[Pull]:
    asked = []
    for _ in range(pulls):
        asked.append(bandit.ask())
        bandit.tell(asked[-1], _hill(space, asked[-1].value))
    return asked


class BanditContract:
    """What holds for every `Bandit`.

    Supply the fixture `make`::

        class TestMyBandit(BanditContract):
            @pytest.fixture
            def make(self):
                return lambda space, rng: MyBandit(space, rng=rng)
    """

    @pytest.fixture
    def make(self) -> MakeBandit:
        """To be supplied: a function (space, rng) → a fresh bandit, for about 100 pulls."""
        pytest.fail("a BanditContract needs a fixture `make` that returns a function (space, rng) -> Bandit")

    @pytest.fixture(params=[LINEAR, LOG], ids=["linear", "log"])
    def space(self, request: pytest.FixtureRequest) -> Interval:
        """The intervals on which the contract is tested."""
        found: Interval = request.param
        return found

    def test_it_is_a_bandit(self, make: MakeBandit, space: Interval) -> None:
        assert isinstance(make(space, np.random.default_rng(0)), Bandit)

    def test_proposals_lie_within_the_space(self, make: MakeBandit, space: Interval) -> None:
        asked = _play(make(space, np.random.default_rng(0)), space, 100)
        assert all(pull.value in space for pull in asked)

    def test_proposals_never_exceed_upper(self, make: MakeBandit, space: Interval) -> None:
        bandit, draw = make(space, np.random.default_rng(0)), np.random.default_rng(1)
        for _ in range(100):
            upper = space.from_unit(float(draw.random()))
            pull = bandit.ask(upper=upper)
            assert space.low <= pull.value <= upper
            bandit.tell(pull, _hill(space, pull.value))

    def test_upper_at_the_lowest_value_proposes_it(self, make: MakeBandit, space: Interval) -> None:
        assert make(space, np.random.default_rng(0)).ask(upper=space.low).value == space.low

    def test_upper_beyond_the_space_is_no_bound(self, make: MakeBandit, space: Interval) -> None:
        bounded, free = make(space, np.random.default_rng(0)), make(space, np.random.default_rng(0))
        assert bounded.ask(upper=2 * space.high) == free.ask()

    @pytest.mark.parametrize("upper", [math.nan, -math.inf, 0.0])
    def test_upper_below_the_space_is_refused(self, make: MakeBandit, space: Interval, upper: float) -> None:
        with pytest.raises(InvalidValueError, match="upper"):
            make(space, np.random.default_rng(0)).ask(upper=upper)

    def test_open_pulls_have_their_own_ids_and_are_told_in_any_order(self, make: MakeBandit, space: Interval) -> None:
        bandit = make(space, np.random.default_rng(0))
        pulls = [bandit.ask() for _ in range(10)]
        assert len({pull.id for pull in pulls}) == 10
        for pull in reversed(pulls):
            bandit.tell(pull, _hill(space, pull.value))
        assert bandit.best() in pulls

    def test_a_pull_that_is_never_told_costs_nothing(self, make: MakeBandit, space: Interval) -> None:
        bandit = make(space, np.random.default_rng(0))
        told = _play(bandit, space, 10)
        best = bandit.best()
        for _ in range(20):
            bandit.ask()
        assert bandit.best() == best
        assert best in told
        assert _play(bandit, space, 5)[-1].value in space

    def test_a_forgotten_pull_is_closed_and_changes_nothing_else(self, make: MakeBandit, space: Interval) -> None:
        bandit = make(space, np.random.default_rng(0))
        told = _play(bandit, space, 10)
        pull, other, best = bandit.ask(), bandit.ask(), bandit.best()
        bandit.forget(pull)
        assert bandit.best() == best
        for again in (bandit.forget, lambda pull: bandit.tell(pull, 0.5)):
            with pytest.raises(InvalidValueError):
                again(pull)
        with pytest.raises(InvalidValueError):
            bandit.forget(told[0])
        bandit.tell(other, _hill(space, other.value))
        assert _play(bandit, space, 5)[-1].id > other.id

    def test_telling_twice_is_refused(self, make: MakeBandit, space: Interval) -> None:
        bandit = make(space, np.random.default_rng(0))
        pull = bandit.ask()
        bandit.tell(pull, 0.5)
        with pytest.raises(InvalidValueError, match="already"):
            bandit.tell(pull, 0.5)

    def test_an_unknown_pull_is_refused(self, make: MakeBandit, space: Interval) -> None:
        bandit = make(space, np.random.default_rng(0))
        pull = bandit.ask()
        with pytest.raises(InvalidValueError):
            bandit.tell(replace(pull, id=pull.id + 1), 0.5)

    @pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
    def test_a_reward_that_is_not_finite_is_refused_and_the_pull_stays_open(
        self, make: MakeBandit, space: Interval, reward: float
    ) -> None:
        bandit = make(space, np.random.default_rng(0))
        pull = bandit.ask()
        before = bandit.state_dict()
        with pytest.raises(InvalidValueError, match="reward"):
            bandit.tell(pull, reward)
        assert bandit.state_dict() == before
        bandit.tell(pull, 0.5)
        assert bandit.best() == pull

    @pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 100.0])
    def test_an_executed_value_outside_the_space_is_refused_and_the_pull_stays_open(
        self, make: MakeBandit, space: Interval, value: float
    ) -> None:
        bandit = make(space, np.random.default_rng(0))
        pull = bandit.ask()
        before = bandit.state_dict()
        with pytest.raises(InvalidValueError, match="value"):
            bandit.tell(replace(pull, value=value), 0.5)
        assert bandit.state_dict() == before
        bandit.tell(pull, 0.5)
        assert bandit.best() == pull

    def test_the_executed_value_is_the_one_that_counts(self, make: MakeBandit, space: Interval) -> None:
        bandit = make(space, np.random.default_rng(0))
        executed = replace(bandit.ask(), value=space.from_unit(0.25))
        bandit.tell(executed, 0.5)
        assert bandit.best() == executed

    def test_drop_is_taken_at_any_value_and_proposals_go_on(self, make: MakeBandit, space: Interval) -> None:
        bandit = make(space, np.random.default_rng(0))
        for step in range(60):
            pull = bandit.ask()
            value = pull.value if step % 3 else space.from_unit(step / 60)
            bandit.tell(replace(pull, value=value), -1.0, drop="below" if step % 2 else "above")
            assert bandit.ask().value in space

    def test_best_needs_a_reward(self, make: MakeBandit, space: Interval) -> None:
        bandit = make(space, np.random.default_rng(0))
        bandit.ask()
        with pytest.raises(InvalidValueError):
            bandit.best()

    def test_it_learns_which_half_pays(self, make: MakeBandit, space: Interval) -> None:
        bandit = make(space, np.random.default_rng(0))
        pays = []
        for _ in range(100):
            pull = bandit.ask()
            pays.append(space.to_unit(pull.value) >= 0.5)
            bandit.tell(pull, 1.0 if pays[-1] else 0.0)
        assert sum(pays[50:]) >= 35
        assert space.to_unit(bandit.best().value) >= 0.5

    def test_equal_generators_give_equal_proposals(self, make: MakeBandit, space: Interval) -> None:
        first, second = (_play(make(space, np.random.default_rng(3)), space, 30) for _ in range(2))
        assert first == second
        assert first != _play(make(space, np.random.default_rng(4)), space, 30)

    def test_the_state_goes_through_json_and_resumes_to_the_same_bits(self, make: MakeBandit, space: Interval) -> None:
        bandit = make(space, np.random.default_rng(0))
        _play(bandit, space, 12)
        pending = bandit.ask()
        text = json.dumps(bandit.state_dict(), allow_nan=False)
        resumed = make(space, np.random.default_rng(99))
        resumed.load_state_dict(json.loads(text))
        assert json.dumps(resumed.state_dict(), allow_nan=False) == text
        for each in (bandit, resumed):
            each.tell(pending, 0.25)
        assert _play(resumed, space, 30) == _play(bandit, space, 30)
        assert resumed.state_dict() == bandit.state_dict()
        assert resumed.best() == bandit.best()

    def test_a_state_is_a_snapshot(self, make: MakeBandit, space: Interval) -> None:
        bandit = make(space, np.random.default_rng(0))
        _play(bandit, space, 5)
        state = bandit.state_dict()
        text = json.dumps(state)
        _play(bandit, space, 5)
        assert json.dumps(state) == text
        bandit.load_state_dict(state)
        _play(bandit, space, 5)
        assert json.dumps(state) == text

    def test_the_state_of_another_space_is_refused_and_changes_nothing(self, make: MakeBandit, space: Interval) -> None:
        bandit = make(space, np.random.default_rng(0))
        before = bandit.state_dict()
        other = make(Interval(2.0, 3.0), np.random.default_rng(0))
        with pytest.raises(InvalidValueError):
            bandit.load_state_dict(other.state_dict())
        with pytest.raises(InvalidValueError):
            bandit.load_state_dict({})
        assert bandit.state_dict() == before
