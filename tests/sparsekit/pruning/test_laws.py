"""The law of budgets: over the zoo and random scores none is exceeded, cuts are exact, multiples and limits hold."""

import functools
from typing import Any

import numpy as np
import torch
import zoo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from laws import check_masked_equals_compact

import sparsekit as sk
from sparsekit.allocation import allocate, by_cost, global_ranking, uniform
from sparsekit.allocation.limits import free_counts, step_of


@functools.cache
def _traced(name: str) -> tuple[Any, Any, Any, sk.UnitGraph, Any]:
    model, args, kwargs, graph = zoo.traced(name)
    return model.eval(), args, kwargs, graph, sk.cost_model(model, *args, graph=graph, **kwargs)


NAMES = sorted(name for name, each in zoo.ZOO.items() if each.groups)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(NAMES),
    kind=st.sampled_from([by_cost, global_ranking, uniform]),
    metric=st.sampled_from(["flops", "params", "bytes"]),
    place=st.floats(0.02, 1.0),
    seed=st.integers(0, 2**16),
    multiple=st.sampled_from([1, 1, 2, 3]),
    limited=st.booleans(),
)
def test_no_budget_is_exceeded_and_every_cut_is_exact(
    name: str, kind: Any, metric: str, place: float, seed: int, multiple: int, limited: bool
) -> None:
    model, args, kwargs, graph, costs = _traced(name)
    rng = np.random.default_rng(seed)
    scores = {name: torch.from_numpy(rng.exponential(size=group.size)) for name, group in graph.groups.items()}
    limits = {next(iter(graph.groups)): (0.5, 1.0)} if limited and not graph.ties else {}
    free = free_counts(graph, limits, multiple)
    least = costs.costs({name: counts[0] for groups, counts in free.items() for name in groups})[metric]
    dense = costs.dense_costs()[metric]
    limit = max(1.0, least + place * (dense - least))
    budget = sk.Budget(**{metric: limit})
    counts = allocate(kind, graph, scores, costs, budget=budget, limits=limits, multiple_of=multiple)
    found = costs.costs(counts)[metric]
    assert found <= limit
    for group in graph.groups.values():
        count = counts[group.name]
        assert count % step_of(group, multiple) == 0 or count == group.size or graph.ties
        assert count >= limits.get(group.name, (0.0, 1.0))[0] * group.size
    mask = sk.mask_from_scores(graph, scores, counts)
    check_masked_equals_compact(model, args, kwargs, graph, mask, gradients=False)
    if kind is by_cost or (kind is global_ranking and multiple == 1 and not limits and not graph.ties):
        for groups, allowed in free.items():
            wider = [n for n in allowed if n > counts[groups[0]]]
            if wider:
                assert costs.costs({**counts, **dict.fromkeys(groups, wider[0])})[metric] > limit
