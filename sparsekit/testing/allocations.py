"""AllocationContract: inherit it and supply one fixture to test an allocation that was written elsewhere."""

import pickle

import pytest
import torch

from sparsekit.allocation.base import Allocation
from sparsekit.allocation.choose import choose
from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.cost import CostModel
from sparsekit.testing.criteria import example_graph


def example_tied_graph() -> UnitGraph:
    """Four groups of 7, 12, 1 and 12 units, each the rows of one matrix; the two of 12 are tied."""
    return example_graph({"first": 7, "lower": 12, "second": 1, "upper": 12}, (("lower", "upper"),))


class AllocationContract:
    """What holds for every `Allocation`; the fixture `allocation` is to be supplied, and `cost` if the allocation reads it."""

    @pytest.fixture
    def cost(self) -> CostModel | None:
        """The cost model of `example_tied_graph()`; none by default."""
        return None

    def test_its_counts_make_a_mask_and_depend_on_nothing_else(self, allocation: Allocation, cost: CostModel | None) -> None:
        assert isinstance(allocation, Allocation)
        graph, before = example_tied_graph(), pickle.loads(pickle.dumps(allocation))
        for seed in range(5):
            generator = torch.Generator().manual_seed(seed)
            scores = {name: torch.rand(group.size, generator=generator) for name, group in graph.groups.items()}
            given = {name: values.clone() for name, values in scores.items()}
            counts = allocation.counts(graph, scores, cost)
            # Out of range, or different in tied groups, they would be refused.
            assert choose(graph, scores, counts).counts() == dict(counts) == dict(before.counts(graph, given, cost))
            assert all(isinstance(count, int) for count in counts.values())
            assert all(torch.equal(values, given[name]) for name, values in scores.items())
            assert allocation == before
