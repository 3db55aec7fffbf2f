"""Ordered: exact choices, and the contract of patterns."""

from __future__ import annotations

import pytest

from sparsekit.criteria import Ordered, PatternView
from sparsekit.testing.patterns import PatternContract, example_graph

GROUP = example_graph().groups["first"]  # 7 units


class TestOrdered(PatternContract):
    @pytest.fixture
    def pattern(self) -> Ordered:
        return Ordered()


def test_a_prefix_stays() -> None:
    assert Ordered().keep(GROUP, 3, PatternView()).tolist() == [True] * 3 + [False] * 4


def test_smaller_submodels_nest_in_larger_ones() -> None:
    small, large = Ordered().keep(GROUP, 2, PatternView()), Ordered().keep(GROUP, 5, PatternView())
    assert bool((large | ~small).all())
