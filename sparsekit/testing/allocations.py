"""AllocationContract: inherit it and supply one fixture to test an allocation that was written elsewhere."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

from sparsekit.allocation.base import Allocation, CostModel
from sparsekit.allocation.choose import choose
from sparsekit.graph.graph import UnitGraph, UnitGroup, UnitSlice

__all__ = ["AllocationContract", "example_scores", "example_tied_graph"]

_SIZES = {"first": 7, "lower": 12, "second": 1, "upper": 12}


def example_tied_graph() -> UnitGraph:
    """Four groups of 7, 12, 1 and 12 units, each the rows of one matrix; the two of 12 are tied."""
    groups = {
        name: UnitGroup(
            name, size, "feature", (UnitSlice(f"{name}.weight", 0, torch.arange(size).reshape(-1, 1), "out", gated=True),)
        )
        for name, size in _SIZES.items()
    }
    shapes = {f"{name}.weight": torch.Size((size, 3)) for name, size in _SIZES.items()}
    return UnitGraph(groups, shapes, ties=(("lower", "upper"),))


def example_scores(seed: int = 0) -> dict[str, Tensor]:
    """Scores of `example_tied_graph()`, drawn from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(size, generator=generator) for name, size in _SIZES.items()}


class AllocationContract:
    """What holds for every `Allocation`.

    Supply the fixture `allocation`, and `cost` if the allocation reads it::

        class TestMyAllocation(AllocationContract):
            @pytest.fixture
            def allocation(self):
                return MyAllocation()
    """

    @pytest.fixture
    def allocation(self) -> Allocation:
        """To be supplied: the allocation."""
        pytest.fail("an AllocationContract needs a fixture `allocation` that returns the allocation to test")

    @pytest.fixture
    def cost(self) -> CostModel | None:
        """The cost model of `example_tied_graph()`; none by default."""
        return None

    def test_it_is_an_allocation(self, allocation: Allocation) -> None:
        assert isinstance(allocation, Allocation)

    @pytest.mark.parametrize("seed", range(5))
    def test_every_group_keeps_at_least_one_unit_and_no_more_than_it_has(
        self, allocation: Allocation, cost: CostModel | None, seed: int
    ) -> None:
        counts = allocation.counts(example_tied_graph(), example_scores(seed), cost)
        assert set(counts) == set(_SIZES)
        assert all(isinstance(count, int) and 1 <= count <= _SIZES[name] for name, count in counts.items())

    @pytest.mark.parametrize("seed", range(5))
    def test_tied_groups_keep_equal_numbers(self, allocation: Allocation, cost: CostModel | None, seed: int) -> None:
        counts = allocation.counts(example_tied_graph(), example_scores(seed), cost)
        assert counts["lower"] == counts["upper"]

    def test_its_counts_make_a_mask(self, allocation: Allocation, cost: CostModel | None) -> None:
        graph, scores = example_tied_graph(), example_scores()
        counts = allocation.counts(graph, scores, cost)
        mask = choose(graph, scores, counts)
        mask.check(graph)
        assert mask.counts() == dict(counts)

    def test_equal_scores_give_equal_counts_and_are_not_changed(self, allocation: Allocation, cost: CostModel | None) -> None:
        graph, scores = example_tied_graph(), example_scores()
        first = allocation.counts(graph, scores, cost)
        assert all(torch.equal(values, example_scores()[name]) for name, values in scores.items())
        assert dict(allocation.counts(graph, scores, cost)) == dict(first)

    def test_no_state_is_kept_between_calls(self, allocation: Allocation, cost: CostModel | None) -> None:
        before = copy.deepcopy(allocation)
        allocation.counts(example_tied_graph(), example_scores(9), cost)
        assert allocation == before

    def test_it_can_be_sent_to_another_process(self, allocation: Allocation) -> None:
        assert pickle.loads(pickle.dumps(allocation)) == allocation
