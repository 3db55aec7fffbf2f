"""What the arguments of a LearnableMask mean together: how it learns, and what its passes cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from sparsekit._torch import eager
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.measure.budget import Budget
from sparsekit.measure.cost import CostModel
from sparsekit.measure.model import cost_model
from sparsekit.tracing.inputs import ModelInputs
from sparsekit.training.gradient_importance import GradientImportance
from sparsekit.training.loss_importance import LossImportance
from sparsekit.training.regularizer import ImportanceRegularizer
from sparsekit.training.rule import Learning


def learning_of(
    learning: Learning | None,
    criterion: object,
    regularizer: ImportanceRegularizer | None,
    explore: float | None,
    steps: int | None,
) -> Learning:
    """Return the settings of learning: those given, or the default ones for the other arguments.

    Raises:
        InvalidValueError: arguments that exclude each other, or settings that are none.
    """
    if learning is not None:
        given = {"explore": explore, "steps": steps, "regularizer": regularizer}
        also = [name for name, value in given.items() if value is not None]
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
    explore = 0.1 if explore is None else explore
    if criterion is None and regularizer is None:
        return LossImportance(explore=explore, steps=steps)
    if steps is not None:
        raise InvalidValueError("steps= is for learning from the loss; leave out criterion= and regularizer=, or steps=")
    return GradientImportance(regularizer=regularizer or ImportanceRegularizer(), explore=explore)


def costs_of(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | Tensor | list[Any] | None,
    graph: UnitGraph,
    budget: Budget | None,
) -> CostModel | None:
    """What numbers of units cost, in FLOPs and in the metrics of a budget, in the first call of the example inputs.

    Returns:
        None where it is not known and no budget asks: without inputs, or where one has the name of an option of `cost_model`.

    Raises:
        InvalidValueError: a budget asks, and it is not known.
    """
    if example_inputs is None:
        if budget is not None:
            raise InvalidValueError(
                "a budget needs example_inputs=(x,), one call's worth of inputs, to count what a pass costs"
            )
        return None
    call = ModelInputs.several(example_inputs)[0]
    taken = sorted(call.kwargs.keys() & {"model", "graph", "metrics", "rules"})
    if taken:
        if budget is None:
            return None
        raise InvalidValueError(
            f"a budget cannot be counted for a model with a keyword input named {taken[0]!r}; pass the inputs by position"
        )
    with eager():  # counting is no reason to compile
        return cost_model(model, *call.args, graph=graph, metrics=() if budget is None else budget.metrics, **call.kwargs)
