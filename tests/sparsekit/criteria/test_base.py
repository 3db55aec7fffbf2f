"""The checks of scores, the registry, and a criterion that was written elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsekit.allocation import select
from sparsekit.criteria import Criterion, Ordered, View, registry
from sparsekit.criteria.base import Need, score_units
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.testing.criteria import CriterionContract, example_graph, example_view


@dataclass(frozen=True)
class Neighbours:
    """Importance smoothed over neighbouring units: the rule of somebody else, in double precision."""

    learned: bool = True
    needs: frozenset[Need] = frozenset()

    def scores(self, graph: UnitGraph, view: View) -> Mapping[str, Tensor]:
        assert view.importance is not None
        return {
            name: torch.nn.functional.avg_pool1d(view.importance[name].double().view(1, 1, -1), 3, 1, 1).view(-1)
            for name in graph.groups
        }


class TestNeighbours(CriterionContract):
    @pytest.fixture
    def criterion(self) -> Neighbours:
        return Neighbours()


@dataclass(frozen=True)
class Fixed:
    """Scores that are given."""

    values: Any
    learned: bool = False
    needs: frozenset[Need] = frozenset()

    def scores(self, graph: UnitGraph, view: View) -> Mapping[str, Tensor]:
        return dict.fromkeys(graph.groups, self.values)


@pytest.mark.parametrize(
    ("values", "given"),
    [
        (torch.ones(6), r"torch.float32 of shape \(6,\)"),
        (torch.ones(7, 1), r"torch.float32 of shape \(7, 1\)"),
        (torch.ones(7, dtype=torch.bool), r"torch.bool of shape \(7,\)"),
        (torch.arange(7), r"torch.int64 of shape \(7,\)"),
        (None, "None"),
    ],
)
def test_scores_that_do_not_fit_name_criterion_and_group(values: object, given: str) -> None:
    expected = rf"Fixed scores of group 'first' must be a float tensor of shape \(7,\), one score a unit, got {given}"
    with pytest.raises(InvalidValueError, match=expected):
        score_units(Fixed(values), example_graph(), View())


def test_a_group_that_was_forgotten_is_named() -> None:
    class Forgetful(Neighbours):
        def scores(self, graph: UnitGraph, view: View) -> Mapping[str, Tensor]:
            return {"first": torch.ones(7)}

    with pytest.raises(InvalidValueError, match="Forgetful scores of group 'second'"):
        select(Forgetful(), example_graph(), 0.5, example_view())


def test_scores_come_in_the_order_of_the_graph() -> None:
    class Backwards(Ordered):
        def scores(self, graph: UnitGraph, view: View) -> Mapping[str, Tensor]:
            return dict(reversed(super().scores(graph, view).items()))

    assert list(score_units(Backwards(), example_graph(), View())) == list(example_graph().groups)


def test_an_object_without_the_three_parts_is_no_criterion() -> None:
    class Half:
        learned = True

        def scores(self, graph: UnitGraph, view: View) -> Mapping[str, Tensor]:
            return {}

    assert isinstance(Ordered(), Criterion)
    assert not isinstance(Half(), Criterion)


def test_criteria_are_found_by_name() -> None:
    assert registry["ordered"] is Ordered
    assert {"learned", "magnitude", "ordered", "random", "rolling"} <= set(registry)
