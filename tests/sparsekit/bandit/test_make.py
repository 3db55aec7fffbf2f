"""Bandits by name: the contract of each, and what makes none."""

from typing import Any

import numpy as np
import pytest

from sparsekit.bandit import PUCBV, Interval, SplitUCBV, make_bandit, registry
from sparsekit.errors import InvalidValueError, UnknownNameError
from sparsekit.testing.bandits import BanditContract, MakeBandit

UNIT = Interval(0.0, 1.0)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


class TestEveryBandit(BanditContract):
    @pytest.fixture(params=sorted(registry))
    def make(self, request: pytest.FixtureRequest) -> MakeBandit:
        return lambda space, rng: make_bandit(request.param, space, rng=rng, horizon=100)


def test_a_bandit_gets_the_horizon_if_it_wants_one_and_its_own_options() -> None:
    made = make_bandit("p-ucbv", UNIT, rng=rng(), horizon=7, arms=3)
    assert isinstance(made, PUCBV)
    assert (made.horizon, len(made.arms)) == (7.0, 3)
    assert isinstance(make_bandit("split-ucbv", UNIT, rng=rng(), horizon=7), SplitUCBV)
    assert isinstance(make_bandit("sparsekit.bandit.pucbv:PUCBV", UNIT, rng=rng()), PUCBV)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("p-ucb", {}, UnknownNameError, "unknown bandit 'p-ucb'; did you mean 'p-ucbv'"),
        ("p-ucbv", {"color": 1}, InvalidValueError, "p-ucbv has no option color; it has horizon, arms, exploration"),
        ("math:pi", {}, InvalidValueError, "must be a class or function of Python that makes a bandit: 3.14"),
        ("builtins:dict", {}, InvalidValueError, "must be a class or function of Python"),
        ("p-ucbv", {"arms": 0}, InvalidValueError, "arms"),
    ],
)
def test_what_makes_no_bandit_is_refused(name: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_bandit(name, UNIT, rng=rng(), **options)
