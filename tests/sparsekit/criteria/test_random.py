"""Random: exact choices, and the contract of criteria."""

from __future__ import annotations

import pytest
import torch

from sparsekit.allocation import select
from sparsekit.criteria import Random, View
from sparsekit.errors import MissingImportanceError
from sparsekit.testing.criteria import CriterionContract, example_graph


class TestRandom(CriterionContract):
    @pytest.fixture
    def criterion(self) -> Random:
        return Random()


def test_every_unit_is_equally_likely() -> None:
    view = View(generator=torch.Generator().manual_seed(0))
    hits = sum(select(Random(), example_graph(), 3 / 7, view)["first"].float() for _ in range(2000)) / 2000
    assert torch.allclose(hits, torch.full((7,), 3 / 7), atol=0.05)


def test_the_first_units_of_one_permutation_a_group_stay() -> None:
    generator, again = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    mask = select(Random(), example_graph(), 0.5, View(generator=generator))
    for name, keep in mask.items():
        drawn = torch.randperm(keep.numel(), generator=again)
        assert set(drawn[: int(keep.sum())].tolist()) == set(keep.nonzero().flatten().tolist()), name
    assert torch.equal(generator.get_state(), again.get_state())


def test_a_missing_generator_says_what_to_pass() -> None:
    with pytest.raises(MissingImportanceError, match=r"generator; pass View\(generator="):
        Random().scores(example_graph(), View())
