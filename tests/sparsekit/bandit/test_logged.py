"""All bandits by name: the contract, settings, spaces, states, and sequences that must not change."""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekit.bandit import PUCBV, Interval, SplitUCBV, make_bandit, registry
from sparsekit.bandit.base import Box
from sparsekit.bandit.search_space import parse_axes
from sparsekit.errors import InvalidValueError, UnknownNameError
from sparsekit.testing import BanditContract, MakeBandit

UNIT = Interval(0.0, 1.0)


def played(name: str, pulls: int = 12, space: Any = UNIT, **options: Any) -> Any:
    """A bandit after some noisy rewards of a hill at 0.7; the last pull is open."""
    bandit = make_bandit(name, space, rng=np.random.default_rng(0), horizon=40, **options)
    noise = np.random.default_rng(1)
    for _ in range(pulls):
        pull = bandit.ask()
        bandit.tell(pull, -abs(space.to_unit(pull.value) - 0.7) + 0.1 * float(noise.normal()))
    bandit.ask()
    return bandit


class TestEveryBandit(BanditContract):
    @pytest.fixture(params=sorted(registry))
    def make(self, request: pytest.FixtureRequest) -> MakeBandit:
        return lambda space, rng: make_bandit(request.param, space, rng=rng, horizon=100)


def test_a_bandit_gets_the_horizon_if_it_wants_one_and_its_own_options() -> None:
    rng = np.random.default_rng(0)
    made = make_bandit("p-ucbv", UNIT, rng=rng, horizon=7, arms=3)
    assert isinstance(made, PUCBV)
    assert (made.horizon, len(made.arms)) == (7.0, 3)
    assert isinstance(make_bandit("split-ucbv", UNIT, rng=rng, horizon=7), SplitUCBV)
    assert isinstance(make_bandit("sparsekit.bandit.pucbv:PUCBV", UNIT, rng=rng), PUCBV)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("p-ucbv", {"space": (0.0, 1.0)}, "space must be an Interval"),
        ("p-ucbv", {"exploration": -0.1}, "exploration"),
        ("p-ucbv", {"arms": 2.5}, "arms must be an integer >="),
        ("p-ucbv", {"arms": 0}, "arms"),
        ("p-ucbv", {"min_width": 1.5}, r"\[0, 1/arms\]"),
        ("split-ucbv", {"discount": 0.9}, "has no option discount"),
        ("p-ucbv", {"horizon": 0}, "horizon"),
        ("p-ucbv", {"decay": 0.0}, r"decay must be in \(0, 1\]"),
        ("p-ucbv", {"color": 1}, "p-ucbv has no option color; it has horizon, arms, exploration"),
        ("p-ucb", {}, "unknown bandit 'p-ucb'; did you mean 'p-ucbv'"),
        ("math:pi", {}, "must be a class or function of Python that makes a bandit: 3.14"),
        ("builtins:dict", {}, "must be a class or function of Python"),
    ],
)
def test_a_name_or_a_setting_that_is_not_allowed_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    given = {"space": UNIT, "rng": np.random.default_rng(0), **options}
    with pytest.raises((InvalidValueError, UnknownNameError), match=message):
        make_bandit(name, given.pop("space"), **given)


@pytest.mark.parametrize("name", sorted(registry))
@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["settings"], {}),
        (["generator", "state"], {}),
        (["log"], None),
        (["log", 0], {"ask": 1}),
        (["log", 1], {"tell": 7, "value": 0.5, "reward": 1.0}),
        (["log", 1, "value"], 1.5),
        (["log", 1, "reward"], math.nan),
        (["log", 1, "eliminate"], "under"),
    ],
)
def test_a_malformed_state_is_refused_and_changes_nothing(name: str, path: list[Any], value: Any) -> None:
    bandit = played(name)
    before = bandit.state_dict()
    state = copy.deepcopy(before)
    target = state
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(InvalidValueError):
        bandit.load_state_dict(state)
    assert bandit.state_dict() == before


def test_a_state_with_other_settings_is_refused_with_the_difference() -> None:
    with pytest.raises(InvalidValueError, match=r"decay 0.9 \(here 0.5\)"):
        played("p-ucbv").load_state_dict(played("p-ucbv", decay=0.9).state_dict())
    with pytest.raises(InvalidValueError, match=r"arms 5 \(here None\)"):
        played("split-ucbv").load_state_dict(played("p-ucbv").state_dict())


# Proposals after 30 rewards of `played`, and the recommended one. Within rounding, since logarithms differ between systems.
LOG = Interval(1e-4, 10.0, "log")
GOLDEN: dict[str, tuple[str, dict[str, Any], Interval, list[float]]] = {
    "p-ucbv": ("p-ucbv", {}, UNIT, [0.7111299383023898, 0.7128136372180836, 0.7122504802756504, 0.7107420375415382]),
    "p-ucbv, fewer arms": (
        "p-ucbv", {"arms": 3, "exploration": 0.5}, LOG,
        [0.3907548647902992, 0.396216116101695, 0.3943810154903194, 0.38950737547399894],
    ),
    "split-ucbv": ("split-ucbv", {}, UNIT, [0.7264897984714136, 0.7264897984714136, 0.7264897984714136, 0.7282692313893515]),
    "split-ucbv, log": (
        "split-ucbv", {}, LOG, [0.4289918014338438, 0.4289918014338438, 0.4289918014338438, 0.4378709737163156],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(GOLDEN))
def test_proposals_stay_what_they_are(case: str) -> None:
    name, options, space, expected = GOLDEN[case]
    bandit = played(name, 30, space, **options)
    assert [*(bandit.ask().value for _ in range(3)), bandit.best().value] == pytest.approx(expected, rel=1e-9)


BOX = Box({"lr": Interval(1e-4, 1.0, scale="log"), "width": Interval(16.0, 64.0)})


@pytest.mark.parametrize(
    ("space", "pairs"),
    [
        (Interval(2, 6), [(2.0, 0.0), (3.0, 0.25), (6.0, 1.0)]),
        (Interval(1e-4, 10.0, scale="log"), [(1e-4, 0.0), (1e-2, 0.4), (10.0, 1.0)]),
        (BOX, [({"lr": 1e-4, "width": 64.0}, (0.0, 1.0)), ({"lr": 1e-2, "width": 28.0}, (0.5, 0.25))]),
    ],
)
def test_values_lie_on_the_scale_of_their_interval(space: Any, pairs: list[tuple[Any, Any]]) -> None:
    for value, share in pairs:
        assert value in space
        assert space.to_unit(value) == pytest.approx(share, abs=1e-15)
        assert space.from_unit(share) == (value if share in (0.0, 1.0, (0.0, 1.0)) else pytest.approx(value, rel=1e-14))


@given(
    low=st.floats(1e-300, 1e300),
    factor=st.floats(1.0, 1e6),
    share=st.floats(0.0, 1.0),
    scale=st.sampled_from(["linear", "log"]),
)
def test_values_stay_in_the_interval_and_come_back(low: float, factor: float, share: float, scale: str) -> None:
    if not low < low * factor < math.inf:
        return
    space = Interval(low, low * factor, scale)
    box = Box({"x": space, "y": UNIT})
    point = box.from_unit((share, share))
    assert point in box
    assert 0.0 <= space.to_unit(point["x"]) <= 1.0
    if factor > 1.001:
        assert box.to_unit(point) == pytest.approx((share, share), abs=1e-9)


def test_an_axis_is_read_from_the_text() -> None:
    distributions = pytest.importorskip("optuna.distributions")

    def read(text: str) -> Any:
        return parse_axes([text]).popitem()

    assert read("lr=1e-4:1e-1:log") == ("lr", distributions.FloatDistribution(1e-4, 0.1, log=True))
    assert read(" x = -3 : 5 ") == ("x", distributions.FloatDistribution(-3.0, 5.0))
    both = ("n", distributions.IntDistribution(1, 64, log=True))
    assert read("n=1:64:int:log") == read("n=1:64:log:int") == both
    assert read("local.proximal=0.1,1, none") == ("local.proximal", distributions.CategoricalDistribution(("0.1", "1", "none")))
    assert read("of=package.module:A,package.module:B")[1].choices == ("package.module:A", "package.module:B")


def interval(low: Any, high: Any, scale: Any = "linear") -> Callable[[], object]:
    return lambda: Interval(low, high, scale)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (interval(2.0, 1.0), "low must be below high"),
        (interval(0.0, 1.0, "log"), "low > 0"),
        (interval(math.nan, 1.0), "low must be a number, got nan"),
        (interval(-1e308, 1e308), "finite"),
        (interval(0.0, "1"), "high must be a number"),
        (interval(0.0, 1.0, "sqrt"), "'linear' or 'log'"),
        (lambda: Box({}), "Interval|Box"),
        *(
            (lambda text=text: parse_axes([text]), message)
            for text, message in (
                ("lr", "must be NAME=LOW:HIGH, .* got 'lr'"),
                ("lr=1,1", "at least two different values"),
                ("x=1:2:sqrt", "must be NAME=LOW:HIGH"),
                ("x=one:2", "at least two different values"),
                ("x=2:1", "x=2:1: low must be below high"),
                ("x=0.5:8:int", "bounds must be whole"),
                ("x=0:8:int:log", "begin at 1 or above"),
            )
        ),
    ],
)
def test_what_is_no_space_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        make()
