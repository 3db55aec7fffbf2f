"""Learned: exact choices, and the contract of criteria."""

from __future__ import annotations

import pytest
import torch

from sparsekit.allocation import choose, select
from sparsekit.criteria import Learned, View
from sparsekit.errors import InvalidValueError, MissingImportanceError
from sparsekit.testing.criteria import CriterionContract, example_graph

GRAPH = example_graph().groups  # "first" has 7 units


class TestLearned(CriterionContract):
    @pytest.fixture
    def criterion(self) -> Learned:
        return Learned()


def _importance(*first: float) -> dict[str, torch.Tensor]:
    return {**{name: torch.ones(group.size) for name, group in GRAPH.items()}, "first": torch.tensor(first)}


def test_the_largest_stay_and_ties_go_to_the_lower_index() -> None:
    importance = _importance(0.1, 0.9, 0.5, 0.5, 0.2, 0.5, 0.0)
    mask = choose(
        example_graph(), Learned().scores(example_graph(), View(importance=importance)), {"first": 3, "second": 1, "third": 16}
    )
    assert mask["first"].nonzero().flatten().tolist() == [1, 2, 3]


@pytest.mark.parametrize("view", [View(), View(importance={"other": torch.ones(7)})])
def test_missing_importance_says_what_to_pass(view: View) -> None:
    with pytest.raises(MissingImportanceError, match=r"importance for group 'first'; pass View\(importance="):
        Learned().scores(example_graph(), view)


def test_nan_is_refused_by_the_names_of_criterion_and_group() -> None:
    view = View(importance=_importance(0.1, float("nan"), 0, 0, 0, 0, 0))
    with pytest.raises(InvalidValueError, match=r"Learned scores of group 'first' hold NaN, for unit 1 first; .*learning rate"):
        select(Learned(), example_graph(), 0.5, view)
