"""States of all bandits: what a malformed one is answered; sequences that must not change."""

import copy
import json
import math
from typing import Any

import numpy as np
import pytest

from sparsekit.bandit import PUCBV, Interval, make_bandit, registry
from sparsekit.errors import InvalidValueError

UNIT = Interval(0.0, 1.0)
TWO = Interval(1.0, math.nextafter(1.0, 2.0))


def played(name: str, pulls: int = 12, space: Any = UNIT, **options: Any) -> Any:
    """A bandit after some noisy rewards of a hill at 0.7; the last pull is open."""
    bandit = make_bandit(name, space, rng=np.random.default_rng(0), horizon=40, **options)
    noise = np.random.default_rng(1)
    for _ in range(pulls):
        pull = bandit.ask()
        bandit.tell(pull, -abs(space.to_unit(pull.value) - 0.7) + 0.1 * float(noise.normal()))
    bandit.ask()
    return bandit


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *((name, {"space": (0.0, 1.0)}, "space must be an Interval") for name in sorted(registry)),
        *((name, {"rng": 0}, r"numpy.random.Generator, got 0") for name in sorted(registry)),
        ("p-ucbv", {"exploration": -0.1}, "exploration"),
        *(("p-ucbv", {"arms": arms}, "arms must be an integer >=") for arms in (0, 2.5, True)),
        ("p-ucbv", {"space": TWO, "arms": 3}, "too few numbers"),
        *(("p-ucbv", {"min_width": width}, r"\[0, 1/arms\]") for width in (1.5, -1.0)),
        *(("split-ucbv", {"discount": discount}, r"discount must be in \(0, 1\]") for discount in (0, 1.1)),
        *(("p-ucbv", {"horizon": horizon}, "horizon") for horizon in (0, math.inf, math.nan)),
        *(("p-ucbv", {"floor": floor}, r"floor must be in \[0, 1\]") for floor in (-0.1, 1.5)),
        *(("p-ucbv", {"decay": decay}, r"decay must be in \(0, 1\]") for decay in (0.0, 1.5)),
    ],
)
def test_a_setting_that_is_not_allowed_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    given = {"space": UNIT, "rng": np.random.default_rng(0), **options}
    with pytest.raises(InvalidValueError, match=message):
        registry[name](given.pop("space"), **given)


@pytest.mark.parametrize("name", sorted(registry))
@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["settings"], {}),
        (["settings", "space", "high"], 2.0),
        (["generator"], None),
        (["generator"], {}),
        (["generator", "bit_generator"], "os"),
        (["generator", "state"], {}),
        (["log"], None),
        (["log", 0], "ask"),
        (["log", 0], {}),
        (["log", 0], {"ask": 1}),
        (["log", 0], {"ask": 0, "lower": 0.5}),
        (["log", 0], {"forget": 0}),
        (["log", 1], {"tell": 7, "value": 0.5, "reward": 1.0}),
        (["log", 1], {"tell": 0, "reward": 1.0}),
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
        played("split-ucbv", discount=0.98).load_state_dict(played("p-ucbv").state_dict())


@pytest.mark.parametrize("name", sorted(registry))
def test_a_printed_bandit_says_where_it_searches_and_how_far_it_is(name: str) -> None:
    bandit = played(name)
    told = ("Interval(low=0.0, high=1.0", "12 told", "1 open", f"best {bandit.best().value}")
    assert [part for part in told if part not in repr(bandit)] == []


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_a_generator_goes_through_json_to_the_same_bits(kind: str) -> None:
    def made(seed: int) -> PUCBV:
        rng = np.random.Generator(getattr(np.random, kind)(seed))
        rng.integers(10, dtype=np.uint32)
        return PUCBV(UNIT, rng=rng)

    bandit, again = made(5), made(6)
    again.load_state_dict(json.loads(json.dumps(bandit.state_dict())))
    assert [again.ask() for _ in range(100)] == [bandit.ask() for _ in range(100)]


# Proposals after 30 rewards of `played`, and the recommended one. Within rounding, since logarithms differ between systems.
LOG = Interval(1e-4, 10.0, "log")
GOLDEN: dict[str, tuple[str, dict[str, Any], Interval, list[float]]] = {
    "p-ucbv": ("p-ucbv", {}, UNIT, [0.7111299383023898, 0.7128136372180836, 0.7122504802756504, 0.7107420375415382]),
    "p-ucbv, fewer arms": (
        "p-ucbv", {"arms": 3, "floor": 0.1, "exploration": 0.5}, LOG,
        [0.3907548647902992, 0.396216116101695, 0.3943810154903194, 0.38950737547399894],
    ),
    "split-ucbv": ("split-ucbv", {}, UNIT, [0.7264897984714136, 0.7264897984714136, 0.7264897984714136, 0.7282692313893515]),
    "split-ucbv, log": (
        "split-ucbv", {}, LOG, [0.4289918014338438, 0.4289918014338438, 0.4289918014338438, 0.4378709737163156],
    ),
    "split-ucbv, discounted": (
        "split-ucbv", {"discount": 0.9}, LOG,
        [0.19124291528624193, 0.277486197818862, 0.22299223302370572, 0.22299223302370572],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(GOLDEN))
def test_proposals_stay_what_they_are(case: str) -> None:
    name, options, space, expected = GOLDEN[case]
    bandit = played(name, 30, space, **options)
    assert [*(bandit.ask().value for _ in range(3)), bandit.best().value] == pytest.approx(expected, rel=1e-9)
