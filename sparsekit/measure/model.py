"""cost_model(): what numbers of units cost, in the metrics that a budget limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from sparsekit.errors import UnknownNameError, nearest
from sparsekit.graph.graph import UnitGraph
from sparsekit.layers import LayerRule
from sparsekit.measure.budget import METRICS
from sparsekit.measure.cost import CostModel, trace_cost
from sparsekit.measure.latency import measure_table
from sparsekit.measure.memory import measure_memory
from sparsekit.measure.tracker import Meter


def cost_model(
    model: nn.Module,
    *example_inputs: Any,
    graph: UnitGraph,
    metrics: Iterable[str] = (),
    rules: Mapping[type[nn.Module], LayerRule] | None = None,
    **example_kwargs: Any,
) -> CostModel:
    """Measure once what numbers of units cost; asking for costs is arithmetic from then on.

    FLOPs, parameters and bytes are exact and always there. The others take passes of the model and must be asked for.

    Args:
        model: The dense model; not changed.
        *example_inputs: One call's inputs; the first axis of the first tensor counts the examples.
        graph: Its units.
        metrics: What is needed, such as `budget.metrics`.
        rules: Rules for layers of your own, as given to `trace_units`.
        **example_kwargs: Keyword inputs.

    Returns:
        The costs: `costs(counts)` for given numbers, `tracker(counts)` for numbers that change step by step.

    Raises:
        TraceError: the model fails on the inputs.
        UnknownNameError: no such metric.
    """
    chosen = tuple(metrics)
    for name in chosen:
        if name not in METRICS:
            raise UnknownNameError(f"unknown metric {name!r}; {nearest(name, METRICS)}")
    costs = trace_cost(model, *example_inputs, graph=graph, **example_kwargs)
    meters: dict[str, Meter] = {}
    if "memory" in chosen:
        meters["memory"] = measure_memory(model, example_inputs, example_kwargs, graph, rules)
    if "latency_ms" in chosen:
        meters["latency_ms"] = measure_table(model, example_inputs, example_kwargs, graph, rules)
    return replace(costs, meters=meters) if meters else costs
