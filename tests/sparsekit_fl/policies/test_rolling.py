"""Rolling: exact choices, and the contract of patterns."""

from __future__ import annotations

import pytest

from sparsekit.criteria import PatternView
from sparsekit.errors import InvalidValueError
from sparsekit.testing.patterns import PatternContract, example_graph
from sparsekit_fl.policies.rolling import Rolling

GROUP = example_graph().groups["first"]  # 7 units


class TestRolling(PatternContract):
    @pytest.fixture
    def pattern(self) -> Rolling:
        return Rolling()


def test_the_window_advances_by_one_and_wraps_around() -> None:
    kept = [Rolling().keep(GROUP, 3, PatternView(round=round)).nonzero().flatten().tolist() for round in (0, 1, 5, 7)]
    assert kept == [[0, 1, 2], [1, 2, 3], [0, 5, 6], [0, 1, 2]]


def test_the_step_is_a_choice() -> None:
    assert Rolling(step=3).keep(GROUP, 2, PatternView(round=2)).nonzero().flatten().tolist() == [0, 6]


def test_all_units_get_their_turn_equally_often() -> None:
    hits = sum(Rolling().keep(GROUP, 3, PatternView(round=round)).int() for round in range(7))
    assert hits.tolist() == [3] * 7


def test_a_step_below_one_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="step must be at least 1"):
        Rolling(step=0)
