"""trace_example(): the units of a model from one call's worth of inputs, in whichever form they come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from sparsekit._torch import eager
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.budget import Budget
from sparsekit.measure.cost import CostModel
from sparsekit.measure.model import cost_model
from sparsekit.tracing.inputs import ModelInputs
from sparsekit.tracing.trace import trace_units

__all__ = ["costs_of", "trace_example"]


def trace_example(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | Tensor | list[Any],
    norm: Literal["fixed", "kept"],
) -> UnitGraph:
    """Trace `model` on what it is called with once: a tuple of positional inputs, a mapping of keyword inputs or one tensor.

    A list of tuples and mappings is several calls, all traced.

    Raises:
        InvalidValueError: inputs of another kind.
        TraceError: the model fails on them.
        NoUnitsError: the model has no units that can be removed exactly.
    """
    return trace_units(model, norm=norm, example_inputs=ModelInputs.several(example_inputs))


def costs_of(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | Tensor | list[Any],
    graph: UnitGraph,
    budget: Budget | None,
) -> CostModel | None:
    """What numbers of units cost, in FLOPs and in the metrics of a budget, in the first call of what `trace_example` takes.

    Returns:
        None where there is no budget and a keyword input has the name of an option of `cost_model`.

    Raises:
        InvalidValueError: there is a budget and a keyword input has such a name.
    """
    metrics = () if budget is None else budget.metrics
    call = ModelInputs.several(example_inputs)[0]
    taken = sorted(call.kwargs.keys() & {"model", "graph", "metrics", "rules"})
    if taken:
        if budget is None:
            return None
        raise InvalidValueError(
            f"a budget cannot be counted for a model with a keyword input named {taken[0]!r}; pass the inputs by position"
        )
    with eager():  # counting is no reason to compile
        return cost_model(model, *call.args, graph=graph, metrics=metrics, **call.kwargs)
