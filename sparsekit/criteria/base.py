"""Criterion and ScoringContext: the importance of units, and the data that it may depend on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict, UnitGraph


@dataclass(frozen=True, kw_only=True)
class ScoringContext:
    """The data that a criterion may use.

    Args:
        weights: State of the dense model.
        generator: Source of randomness, for criteria that need one.
        model: The dense model, for criteria that run it on data. Its modes, flags and gradients are restored afterwards.
        call: Positional and keyword inputs of one call of the model.
    """

    weights: StateDict | None = None
    generator: torch.Generator | None = None
    model: nn.Module | None = None
    call: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None


@runtime_checkable
class Criterion(Protocol):
    """Scores the importance of units. `mask_from_scores` then keeps the units with the largest scores in each group.

    The optional attribute `comparable` says whether scores of different groups have the same meaning, so that all units can be
    ranked together. Without it, they do not.
    """

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:
        """Score every unit.

        Args:
            graph: Unit graph with the groups to score.
            context: The data that the scores may depend on.

        Returns:
            Group name → float (units,), for every group; larger stays, NaN is not allowed. Any device, any float dtype.

        Raises:
            MissingImportanceError: the context lacks an entry that the criterion needs, or the criterion lacks batches.
            InvalidValueError: scores that are not finite, or groups that the criterion cannot score.
        """
        ...


def is_comparable(criterion: object) -> bool:
    """Return whether scores of different groups have the same meaning."""
    return bool(getattr(criterion, "comparable", False))


def check_scores(graph: UnitGraph, scores: Mapping[str, Tensor], source: str) -> None:
    """Raise InvalidValueError, with their source, unless `scores` has a float vector for each group."""
    for name, group in graph.groups.items():
        found = scores.get(name)
        if not isinstance(found, Tensor) or found.shape != (group.size,) or not found.is_floating_point():
            given = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
            raise InvalidValueError(
                f"{source} of group {name!r} must be a float tensor of shape ({group.size},), one score a unit, got {given}"
            )


def refuse_nan(values: Tensor, what: str) -> None:
    if bool(torch.isnan(values).any()):
        raise InvalidValueError(
            f"{what} hold NaN, for unit {int(torch.isnan(values).nonzero()[0])} first; look for NaN in the weights or the data,"
            " and where training diverged, see that the model is in train mode, then lower the learning rate"
        )


def score_units(criterion: Criterion, graph: UnitGraph, context: ScoringContext) -> dict[str, Tensor]:
    """Return the scores of `criterion`, in the order of the graph, and check their shapes."""
    if not callable(getattr(criterion, "scores", None)) or isinstance(criterion, type):
        raise InvalidValueError(
            "criterion must be an object with `scores`, such as sparsekit.criteria.Magnitude() or, by name,"
            f" sparsekit.criteria.registry['magnitude'](); got {criterion!r}"
        )
    scores = criterion.scores(graph, context)
    check_scores(graph, scores, f"{type(criterion).__name__} scores")
    return {name: scores[name] for name in graph.groups}
