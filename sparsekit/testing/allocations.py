"""AllocationContract: inherit it and supply one fixture to test an allocation that was written elsewhere."""

import copy

import pytest
import torch
from torch import nn

from sparsekit.allocation.masks import mask_from_scores
from sparsekit.allocation.problem import Allocation, allocate
from sparsekit.measure.budget import Budget
from sparsekit.measure.cost import measure_costs
from sparsekit.tracing.trace import trace_units


class AllocationContract:
    """Laws of every `Allocation`; supply the fixture `allocation`."""

    @pytest.mark.parametrize("budget", ["flops=60%", "params=60%"])
    def test_its_counts_meet_the_budget_and_depend_on_nothing_else(self, allocation: Allocation, budget: str) -> None:
        model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 3))
        x = torch.zeros(2, 6)
        graph = trace_units(model, x)
        costs = measure_costs(model, (x,), {}, graph)
        for seed in range(5):
            generator = torch.Generator().manual_seed(seed)
            scores = {name: torch.rand(group.size, generator=generator) for name, group in graph.groups.items()}
            given = copy.deepcopy(scores)
            counts = allocate(allocation, graph, scores, costs, budget=Budget.of(budget))
            # Out of range, they would be refused.
            assert mask_from_scores(graph, scores, counts).counts() == dict(counts)
            assert dict(counts) == dict(allocate(allocation, graph, given, costs, budget=Budget.of(budget)))
            assert all(isinstance(count, int) for count in counts.values())
            assert all(torch.equal(values, given[name]) for name, values in scores.items())
