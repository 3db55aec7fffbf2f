"""Ordered: exact choices, and the contract of criteria."""

from __future__ import annotations

import pytest

from sparsekit.allocation import select
from sparsekit.criteria import Ordered, View
from sparsekit.testing.criteria import CriterionContract, example_graph


class TestOrdered(CriterionContract):
    @pytest.fixture
    def criterion(self) -> Ordered:
        return Ordered()


def test_a_prefix_stays() -> None:
    assert select(Ordered(), example_graph(), 0.4, View())["first"].tolist() == [True] * 3 + [False] * 4


def test_smaller_submodels_nest_in_larger_ones() -> None:
    small, large = (select(Ordered(), example_graph(), ratio, View()) for ratio in (0.2, 0.7))
    assert all(bool((large[name] | ~small[name]).all()) for name in large)
