"""BanditContract: inherit it and supply one fixture to test a bandit that was written elsewhere."""

import json
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from sparsekit.bandit.base import Bandit, Interval, Pull
from sparsekit.errors import InvalidValueError

MakeBandit = Callable[[Interval, np.random.Generator], Bandit]
"""Builds a fresh bandit over an interval, for about 100 pulls, that draws from the given generator."""


def _play(bandit: Bandit, space: Interval, pulls: int) -> list[Pull]:
    """Pull with rewards that are highest at 0.7 of the way."""
    asked = []
    for _ in range(pulls):
        asked.append(bandit.ask())
        assert asked[-1].value in space
        bandit.tell(asked[-1], -abs(space.to_unit(asked[-1].value) - 0.7))
    return asked


class BanditContract:
    """Laws of every `Bandit`; supply the fixture `make`, a `MakeBandit`."""

    @pytest.fixture(params=[Interval(0.0625, 1.0), Interval(1e-4, 10.0, scale="log")], ids=["linear", "log"])
    def space(self, request: pytest.FixtureRequest) -> Interval:
        """Return an interval on which the contract is tested."""
        found: Interval = request.param
        return found

    @pytest.fixture
    def bandit(self, make: MakeBandit, space: Interval) -> Bandit:
        """Return a fresh bandit."""
        found = make(space, np.random.default_rng(0))
        assert isinstance(found, Bandit)
        return found

    def test_proposals_lie_within_the_space_and_below_upper(self, bandit: Bandit, space: Interval) -> None:
        draw = np.random.default_rng(1)
        for step in range(100):
            upper = space.from_unit(float(draw.random()))
            pull = bandit.ask(upper=upper)
            assert space.low <= pull.value <= upper
            executed = pull.value if step % 3 else space.from_unit(step / 100)
            eliminate = (None, "above", "below")[step % 3]
            bandit.tell(replace(pull, value=executed), -1.0, eliminate=eliminate)  # type: ignore[arg-type]
            assert bandit.ask().value in space
        assert bandit.ask(upper=space.low).value == space.low
        for upper in (math.nan, -math.inf, 0.0):
            with pytest.raises(InvalidValueError, match="upper"):
                bandit.ask(upper=upper)

    def test_pulls_are_told_once_in_any_order_or_forgotten(self, bandit: Bandit, space: Interval) -> None:
        with pytest.raises(InvalidValueError):
            bandit.best()
        pulls = [bandit.ask() for _ in range(10)]
        assert len({pull.id for pull in pulls}) == 10
        bandit.forget(pulls[0])
        for pull in reversed(pulls[1:]):
            bandit.tell(pull, -abs(space.to_unit(pull.value) - 0.7))
        assert bandit.best() in pulls[1:]
        for pull in (*pulls, replace(pulls[0], id=pulls[-1].id + 1)):
            for close in (bandit.forget, lambda pull: bandit.tell(pull, 0.5)):
                with pytest.raises(InvalidValueError):
                    close(pull)

    def test_what_is_refused_changes_nothing(self, make: MakeBandit, bandit: Bandit, space: Interval) -> None:
        pull = bandit.ask()
        before = bandit.state_dict()
        for value, reward in ((pull.value, math.nan), (pull.value, math.inf), (math.nan, 0.5), (-1.0, 0.5), (100.0, 0.5)):
            with pytest.raises(InvalidValueError):
                bandit.tell(replace(pull, value=value), reward)
        for state in (make(Interval(2.0, 3.0), np.random.default_rng(0)).state_dict(), {}):
            with pytest.raises(InvalidValueError):
                bandit.load_state_dict(state)
        assert bandit.state_dict() == before
        executed = replace(pull, value=space.from_unit(0.25))
        bandit.tell(executed, 0.5)
        assert bandit.best() == executed

    def test_it_learns_which_half_pays(self, bandit: Bandit, space: Interval) -> None:
        pays = []
        for _ in range(100):
            pull = bandit.ask()
            pays.append(space.to_unit(pull.value) >= 0.5)
            bandit.tell(pull, 1.0 if pays[-1] else 0.0)
        assert sum(pays[50:]) >= 35
        assert space.to_unit(bandit.best().value) >= 0.5

    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_what_fails_is_avoided(self, make: MakeBandit, space: Interval, seed: int) -> None:
        """Everything above the middle fails: no value is asked more than a few times, and half of the asks land below."""
        for rewarded in (lambda share: share, lambda share: 1.0 - share, lambda _: 5.0):
            bandit, asked = make(space, np.random.default_rng(seed)), []
            for _ in range(60):
                pull = bandit.ask()
                asked.append(space.to_unit(pull.value))
                if asked[-1] > 0.5:
                    bandit.forget(pull)
                else:
                    bandit.tell(pull, rewarded(asked[-1]))
            failed = [share for share in asked if share > 0.5]
            assert len(failed) <= 30
            assert max((failed.count(share) for share in failed), default=0) <= 3
            assert space.to_unit(bandit.best().value) <= 0.5
            resumed = make(space, np.random.default_rng(99))
            resumed.load_state_dict(json.loads(json.dumps(bandit.state_dict(), allow_nan=False)))
            assert resumed.ask() == bandit.ask()

    def test_a_search_in_which_all_fails_tries_many_values(self, bandit: Bandit) -> None:
        values = []
        for _ in range(40):
            pull = bandit.ask()
            values.append(pull.value)
            bandit.forget(pull)
        assert len(set(values)) >= 20

    def test_the_state_goes_through_json_and_resumes_to_the_same_bits(
        self, make: MakeBandit, bandit: Bandit, space: Interval
    ) -> None:
        assert _play(bandit, space, 12) != _play(make(space, np.random.default_rng(4)), space, 12)
        pending, state = bandit.ask(), bandit.state_dict()
        text = json.dumps(state, allow_nan=False)
        resumed = make(space, np.random.default_rng(99))
        resumed.load_state_dict(json.loads(text))
        for each in (bandit, resumed):
            each.tell(pending, 0.25)
        assert _play(resumed, space, 30) == _play(bandit, space, 30)
        assert resumed.state_dict() == bandit.state_dict()
        assert json.dumps(state, allow_nan=False) == text, "a state is a snapshot"
