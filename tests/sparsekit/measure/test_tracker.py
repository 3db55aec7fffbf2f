"""Costs by numbers of units: step by step equal to those from scratch."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import zoo

import sparsekit as sk

NAMES = ["residual", "concat", "squeeze-excite", "vgg-small", "gpt", "vit-fused-qkv", "llama", "depthwise", "lstm-stacked"]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_the_tracker_is_the_difference_of_the_costs(name: str) -> None:
    model, args, kwargs = zoo.build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = sk.trace_units(model, *args, **kwargs)
    costs = sk.cost_model(model, *args, graph=graph, **kwargs)
    counts = {name: group.size for name, group in graph.groups.items()}
    tracker, now = costs.tracker(counts), costs.costs(counts)
    limits = {"flops": now["flops"] / 2, "params": now["params"] / 3}
    rng = np.random.default_rng(1)
    for _ in range(20):
        groups = graph.tied_sets[int(rng.integers(len(graph.tied_sets)))]
        count = int(rng.integers(1, graph.groups[groups[0]].size + 1))
        counts.update(dict.fromkeys(groups, count))
        after = costs.costs(counts)
        gain = sum((now[name] - after[name]) / limit for name, limit in limits.items() if now[name] > limit)
        assert tracker.change(groups, count) == pytest.approx({name: after[name] - now[name] for name in now})
        assert tracker.gain(groups, count, limits) == pytest.approx(gain)
        tracker.move(groups, count)
        assert tracker.totals() == pytest.approx(after)
        now = after
