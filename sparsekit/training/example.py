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
from sparsekit.tracing.trace import trace_units

__all__ = ["costs_of", "trace_example"]


def trace_example(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | Tensor,
    norm: Literal["fixed", "kept"],
) -> UnitGraph:
    """Trace `model` on what it is called with once: a tuple of positional inputs, a mapping of keyword inputs or one tensor.

    Raises:
        InvalidValueError: inputs of another kind.
        TraceError: the model fails on them.
        NoUnitsError: the model has no units that can be removed exactly.
    """
    if isinstance(example_inputs, Mapping):
        return trace_units(model, norm=norm, example_kwargs=example_inputs)
    if isinstance(example_inputs, Tensor):
        return trace_units(model, example_inputs, norm=norm)
    if not isinstance(example_inputs, tuple | list):
        raise InvalidValueError(
            "example_inputs must be a tuple of positional inputs, a mapping of keyword inputs or one tensor,"
            f" got {type(example_inputs).__name__}; pass (x,), one call's worth of inputs"
        )
    return trace_units(model, *example_inputs, norm=norm)


def costs_of(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | Tensor,
    graph: UnitGraph,
    budget: Budget | None,
) -> CostModel | None:
    """What numbers of units cost, in FLOPs and in the metrics of a budget, from inputs as `trace_example` takes them.

    Returns:
        None where there is no budget and a keyword input has the name of an option of `cost_model`.

    Raises:
        InvalidValueError: there is a budget and a keyword input has such a name.
    """
    metrics = () if budget is None else budget.metrics
    named = dict(example_inputs) if isinstance(example_inputs, Mapping) else {}
    taken = sorted(named.keys() & {"model", "graph", "metrics", "rules"})
    if taken:
        if budget is None:
            return None
        raise InvalidValueError(
            f"a budget cannot be counted for a model with a keyword input named {taken[0]!r}; pass the inputs by position"
        )
    inputs: tuple[Any, ...] = ()
    if not named:
        inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    with eager():  # counting is no reason to compile
        return cost_model(model, *inputs, graph=graph, metrics=metrics, **named)
