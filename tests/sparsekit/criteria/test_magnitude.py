"""Magnitude: exact choices, and the contract of criteria."""

from __future__ import annotations

import pytest
import torch

from sparsekit.criteria import Magnitude, View
from sparsekit.errors import MissingImportanceError
from sparsekit.testing.criteria import CriterionContract, example_graph, example_view


class TestMagnitude(CriterionContract):
    @pytest.fixture
    def criterion(self) -> Magnitude:
        return Magnitude()


def test_scores_are_absolute_sums() -> None:
    weight = torch.tensor([[1.0, -1, 0], [0, 0, 0.5], [-3, 0, 0], [0, 0, 0], [1, 1, 1], [0, 2, 0], [0.1, 0.1, 0.1]])
    weights = {**dict(example_view().weights or {}), "first.weight": weight}
    scores = Magnitude().scores(example_graph(), View(weights=weights))
    assert torch.allclose(scores["first"], torch.tensor([2.0, 0.5, 3.0, 0.0, 3.0, 2.0, 0.3]))


def test_missing_weights_say_what_to_pass() -> None:
    with pytest.raises(MissingImportanceError, match=r"weights; pass View\(weights="):
        Magnitude().scores(example_graph(), View())
