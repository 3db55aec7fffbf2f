"""Rolling: exact choices, and the contract of criteria."""

from __future__ import annotations

import pytest

from sparsekit.allocation import Uniform, choose
from sparsekit.testing.criteria import CriterionContract, example_graph, example_view
from sparsekit_fl.methods.fedrolex import Rolling
from sparsekit_fl.policies.mask import RoundView


def _kept(round: int, count: int, step: int = 1) -> list[int]:
    """The units of the group of 7 that stay in a round."""
    graph = example_graph()
    scores = Rolling(step=step).scores(graph, RoundView(round=round))
    return choose(graph, scores, {**Uniform(1.0).counts(graph, scores), "first": count})["first"].nonzero().flatten().tolist()


class TestRolling(CriterionContract):
    @pytest.fixture
    def criterion(self) -> Rolling:
        return Rolling()

    def view(self, seed: int = 0) -> RoundView:
        return RoundView(round=3 + seed, **vars(example_view(seed)))


def test_the_window_advances_by_one_and_wraps_around() -> None:
    kept = [_kept(round, 3) for round in (0, 1, 5, 7)]
    assert kept == [[0, 1, 2], [1, 2, 3], [0, 5, 6], [0, 1, 2]]


def test_the_step_is_a_choice() -> None:
    assert _kept(2, 2, step=3) == [0, 6]
