"""Magnitude: exact choices, and the contract of patterns."""

from __future__ import annotations

import pytest
import torch

from sparsekit.criteria import Magnitude, PatternView
from sparsekit.errors import MissingImportanceError
from sparsekit.testing.patterns import PatternContract, example_graph

GROUP = example_graph().groups["first"]  # 7 units


class TestMagnitude(PatternContract):
    @pytest.fixture
    def pattern(self) -> Magnitude:
        return Magnitude()


def test_the_largest_absolute_sums_stay() -> None:
    weight = torch.tensor([[1.0, -1, 0], [0, 0, 0.5], [-3, 0, 0], [0, 0, 0], [1, 1, 1], [0, 2, 0], [0.1, 0.1, 0.1]])
    keep = Magnitude().keep(GROUP, 2, PatternView(weights={"first.weight": weight}))
    assert keep.nonzero().flatten().tolist() == [2, 4]


def test_missing_weights_say_what_to_pass() -> None:
    with pytest.raises(MissingImportanceError, match="weights"):
        Magnitude().keep(GROUP, 2, PatternView())
