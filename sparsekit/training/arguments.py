"""What the arguments of LearnableMask mean together."""

from typing import Any

from torch import nn

from sparsekit._torch import eager
from sparsekit.criteria.base import Criterion
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.budget import Budget
from sparsekit.measure.cost import CostModel, measure_costs
from sparsekit.tracing.inputs import ModelInputs
from sparsekit.tracing.trace import trace_units
from sparsekit.training.gradient_importance import GradientImportance
from sparsekit.training.loss_importance import LossImportance
from sparsekit.training.narrow_model import Rules
from sparsekit.training.rule import Learning


def learning_of(
    learning: Learning | None,
    criterion: object,
    explore: float | None,
    steps: int | None,
) -> Learning:
    """Return the settings of learning: those given, or the default ones for the other arguments.

    Raises:
        InvalidValueError: arguments that exclude each other, or settings that are none.
    """
    if criterion is not None and (isinstance(criterion, type) or not isinstance(criterion, Criterion)):
        raise InvalidValueError(
            f"criterion must be an object with a method `scores`, such as criterion=Magnitude(), got {criterion!r}"
        )
    if learning is not None:
        also = [name for name, value in (("explore", explore), ("steps", steps)) if value is not None]
        if also:
            raise InvalidValueError(
                f"learning= was given together with {', '.join(also)}, which it has itself; pass them to"
                f" {type(learning).__name__}(…)"
            )
        if not isinstance(learning, Learning):
            raise InvalidValueError(f"learning must be LossImportance(…) or GradientImportance(…), got {learning!r}")
        if criterion is not None and isinstance(learning, LossImportance):
            raise InvalidValueError(
                "criterion= says what a unit is worth, and LossImportance learns it; leave one of them out, or pass"
                " start=criterion to choose the first mask by it"
            )
        return learning
    if criterion is None:
        return LossImportance(explore=0.1 if explore is None else explore, steps=steps)
    if explore is not None or steps is not None:
        raise InvalidValueError("explore= and steps= are for learning from the loss; leave them out, or criterion=")
    return GradientImportance()


def costs_of(
    model: nn.Module, example_inputs: Any, graph: UnitGraph, budget: Budget | None, rules: Rules | None
) -> CostModel | None:
    """Return the cost of the model by its widths; None without example inputs.

    Raises:
        InvalidValueError: a budget without example inputs.
    """
    if example_inputs is None:
        if budget is None:
            return None
        raise InvalidValueError("a budget needs example_inputs=(x,), one call's worth of inputs, to count what a pass costs")
    call = ModelInputs.several(example_inputs)[0]
    with eager():  # counting should not compile
        return measure_costs(model, call.args, call.kwargs, graph, () if budget is None else budget.metrics, rules)


def graph_of(
    model: nn.Module, example_inputs: Any, graph: UnitGraph | None, rules: Rules | None, *, prune_norms: bool
) -> UnitGraph:
    """Return the units: those given, or those that a trace finds.

    Raises:
        InvalidValueError: neither example inputs nor a graph.
        ForeignMaskError: the graph was traced from another model.
    """
    if graph is None:
        if example_inputs is None:
            raise InvalidValueError("pass example_inputs=(x,), one call's worth of inputs, or a ready graph=")
        graph = trace_units(model, prune_norms=prune_norms, rules=rules, further_calls=ModelInputs.several(example_inputs))
    graph.check_state(model.state_dict(), what="the model")
    return graph
