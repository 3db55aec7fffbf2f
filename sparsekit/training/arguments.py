"""learning_of(): how a LearnableMask learns, from the arguments that say it in different ways."""

from __future__ import annotations

from sparsekit.errors import InvalidValueError
from sparsekit.training.gradient_importance import GradientImportance
from sparsekit.training.loss_importance import LossImportance
from sparsekit.training.regularizer import ImportanceRegularizer
from sparsekit.training.rule import Learning

__all__ = ["learning_of"]


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
        if isinstance(learning, type) or not isinstance(learning, Learning):
            raise InvalidValueError(
                f"learning must be LossImportance(…), GradientImportance(…) or an object with `rule`, got {learning!r}"
            )
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
