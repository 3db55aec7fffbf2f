"""The book of pulls, and the state of a generator."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sparsekit.bandit import Interval, Pull
from sparsekit.bandit.pulls import PullRecords, generator_from_state, generator_state
from sparsekit.errors import InvalidValueError


def test_a_pull_is_open_until_it_is_told() -> None:
    records = PullRecords(Interval(0.0, 1.0))
    first, second = records.propose(0.25), records.propose(0.75)
    assert (first, second) == (Pull(0, 0.25), Pull(1, 0.75))
    assert records.settle(Pull(1, 0.5), -2, "below") == (0.5, -2.0)
    assert records.state_dict() == {"next": 2, "open": [[0, 0.25]], "told": [[1, 0.5, -2.0]]}
    with pytest.raises(InvalidValueError, match=r"pull 1 has already been told; open are \[0\]"):
        records.settle(second, 0.0, None)
    assert PullRecords.from_state(json.loads(json.dumps(records.state_dict())), records.space).propose(1.0) == Pull(2, 1.0)


def test_a_bound_is_clipped_to_the_space() -> None:
    records = PullRecords(Interval(0.25, 1.0))
    assert [records.check_upper(upper) for upper in (None, 0.25, 0.5, 7)] == [1.0, 0.25, 0.5, 1.0]


@pytest.mark.parametrize("name", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_a_generator_goes_through_json_to_the_same_bits(name: str) -> None:
    rng = np.random.Generator(getattr(np.random, name)(5))
    rng.random(7)
    rng.integers(10, dtype=np.uint32)
    again = generator_from_state(json.loads(json.dumps(generator_state(rng))))
    assert again.random(100).tolist() == rng.random(100).tolist()
    assert again.integers(1000, size=9).tolist() == rng.integers(1000, size=9).tolist()


def test_an_unknown_bit_generator_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="bit_generator must be one of"):
        generator_from_state({"bit_generator": "Generator"})
