"""TopImportance: exact choices, and the contract of patterns."""

from __future__ import annotations

import pytest
import torch

from sparsekit.criteria import PatternView, TopImportance
from sparsekit.errors import InvalidValueError, MissingImportanceError
from sparsekit.testing.patterns import PatternContract, example_graph

GROUP = example_graph().groups["first"]  # 7 units


class TestTopImportance(PatternContract):
    @pytest.fixture
    def pattern(self) -> TopImportance:
        return TopImportance()


def test_the_largest_stay_and_ties_go_to_the_lower_index() -> None:
    view = PatternView(importance={"first": torch.tensor([0.1, 0.9, 0.5, 0.5, 0.2, 0.5, 0.0])})
    assert TopImportance().keep(GROUP, 3, view).nonzero().flatten().tolist() == [1, 2, 3]


@pytest.mark.parametrize("view", [PatternView(), PatternView(importance={"other": torch.ones(7)})])
def test_missing_importance_says_what_to_pass(view: PatternView) -> None:
    with pytest.raises(MissingImportanceError, match="importance for group 'first'"):
        TopImportance().keep(GROUP, 3, view)


def test_nan_is_refused() -> None:
    view = PatternView(importance={"first": torch.tensor([0.1, float("nan"), 0, 0, 0, 0, 0])})
    with pytest.raises(InvalidValueError, match="NaN"):
        TopImportance().keep(GROUP, 3, view)
