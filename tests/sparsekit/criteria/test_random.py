"""Random: exact choices, and the contract of patterns."""

from __future__ import annotations

import pytest
import torch

from sparsekit.criteria import PatternView, Random
from sparsekit.errors import MissingImportanceError
from sparsekit.testing.patterns import PatternContract, example_graph

GROUP = example_graph().groups["first"]  # 7 units


class TestRandom(PatternContract):
    @pytest.fixture
    def pattern(self) -> Random:
        return Random()


def test_every_unit_is_equally_likely() -> None:
    view = PatternView(generator=torch.Generator().manual_seed(0))
    hits = sum(Random().keep(GROUP, 3, view).float() for _ in range(2000)) / 2000
    assert torch.allclose(hits, torch.full((7,), 3 / 7), atol=0.05)


def test_a_missing_generator_says_what_to_pass() -> None:
    with pytest.raises(MissingImportanceError, match="generator"):
        Random().keep(GROUP, 2, PatternView())
