"""Costs by numbers of units: equal to those of masks, and step by step equal to those from scratch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import zoo

import sparsekit as sk

NAMES = ["residual", "concat", "squeeze-excite", "vgg-small", "gpt", "vit-fused-qkv", "llama", "depthwise", "lstm-stacked"]


class _SlowTracker:
    """A tracker that predicts everything at each step."""

    def __init__(self, cost: sk.allocation.CostModel, counts: Mapping[str, int], metrics: Sequence[str]) -> None:
        self._cost = cost
        self._counts = dict(counts)
        self._metrics = tuple(metrics)
        self._totals = self._at(self._counts)

    def _at(self, counts: Mapping[str, int]) -> dict[str, float]:
        costs = self._cost.costs(counts)
        return {name: costs[name] for name in self._metrics}

    def totals(self) -> Mapping[str, float]:
        return self._totals

    def change(self, groups: Sequence[str], count: int) -> Mapping[str, float]:
        after = self._at({**self._counts, **dict.fromkeys(groups, count)})
        return {name: after[name] - total for name, total in self._totals.items()}

    def gain(self, groups: Sequence[str], count: int, limits: Mapping[str, float]) -> float:
        changes = self.change(groups, count)
        return sum(-changes[name] / limit for name, limit in limits.items() if self._totals[name] > limit)

    def move(self, groups: Sequence[str], count: int) -> None:
        self._counts.update(dict.fromkeys(groups, count))
        self._totals = self._at(self._counts)


def _costs(name: str) -> tuple[sk.UnitGraph, sk.allocation.CostModel, object]:
    model, args, kwargs = zoo.build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = sk.trace_units(model, *args, **kwargs)
    return graph, sk.cost_model(model, *args, graph=graph, **kwargs), model


@pytest.mark.parametrize("name", [name for name in NAMES if name in zoo.ZOO])
def test_a_step_of_the_tracker_is_the_difference_of_the_costs(name: str) -> None:
    graph, costs, _ = _costs(name)
    counts = {name: group.size for name, group in graph.groups.items()}
    fast = costs.tracker(counts)
    slow = _SlowTracker(costs, counts, ("flops", "params", "bytes"))
    limits = {"flops": slow.totals()["flops"] / 2, "params": slow.totals()["params"] / 3}
    rng = np.random.default_rng(1)
    ties = graph.tied_sets
    for _ in range(20):
        groups = ties[int(rng.integers(len(ties)))]
        count = int(rng.integers(1, graph.groups[groups[0]].size + 1))
        assert fast.change(groups, count) == pytest.approx(slow.change(groups, count))
        assert fast.gain(groups, count, limits) == pytest.approx(slow.gain(groups, count, limits))
        fast.move(groups, count)
        slow.move(groups, count)
        assert fast.totals() == pytest.approx(slow.totals())
