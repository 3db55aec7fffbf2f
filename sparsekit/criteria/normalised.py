"""Normalised and Lamp: scores divided by what is usual in their group, so that groups can be compared."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from sparsekit.criteria.base import Criterion, ScoringContext, is_learned, score_units
from sparsekit.criteria.weights import Magnitude
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import wide

By = Literal["mean", "sum", "max", "standard", "rank", "share_of_remaining"]


def share_of_remaining(scores: Tensor) -> Tensor:
    """s² / Σ s² over the units that are left of the group when the unit goes, the worst first; float64 (units,).

    Scores of 3, 1 and 2 give 1, 1/14 and 4/13. Of equal units the higher index goes first; where scores are negative the
    least of them counts as 0, and where all are 0 the units are equal.
    """
    values = scores.detach().double()
    order = torch.sort(values, descending=True, stable=True).indices
    ranked = values[order]
    ranked = ranked - ranked[-1].clamp_max(0.0)
    ranked = ranked / ranked[0] if ranked[0] > 0 else torch.ones_like(ranked)
    return torch.empty_like(values).index_copy_(0, order, ranked.square() / ranked.square().cumsum(0))


@dataclass(frozen=True)
class Normalised:
    """Divide the scores of each group, so that one ranking can be made of all units.

    Layers differ in the scale of their weights and gradients by more than units of a layer do. Without division a global
    ranking empties the layers of small scale.

    Args:
        criterion: What a unit is worth.
        by: "mean", "sum" or "max" of the absolute scores of the group; "standard": minus the mean, divided by the standard
            deviation; "rank": place in the group, from 1/units for the least to 1, of two equal scores the lower index
            ranks higher; "share_of_remaining": the square's share in those of all units at least as large, as in `Lamp`.

    Raises:
        InvalidValueError: another `by`.

    Source: "mean" as in Torch-Pruning (Fang et al., DepGraph, CVPR 2023), whose global ranking divides so by default.
    """

    criterion: Criterion
    by: By = "mean"

    comparable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.by not in get_args(By):
            raise InvalidValueError(f"by must be one of {', '.join(get_args(By))}, got {self.by!r}")

    @property
    def learned(self) -> bool:
        """As the criterion's."""
        return is_learned(self.criterion)

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:
        """Divide the criterion's scores; the order within each group stays."""
        return {name: self._one(wide(s.detach())) for name, s in score_units(self.criterion, graph, context).items()}

    def _one(self, scores: Tensor) -> Tensor:
        if self.by == "share_of_remaining":
            return share_of_remaining(scores)
        if self.by == "rank":
            order = scores.argsort(descending=True, stable=True)
            places = torch.arange(scores.numel(), 0, -1, device=scores.device).to(scores)
            return torch.empty_like(scores).index_copy_(0, order, places / scores.numel())
        if self.by == "standard":
            centred = scores - scores.mean()
            return centred / centred.square().mean().sqrt().clamp_min(1e-30)
        usual = scores.abs()
        scale = usual.mean() if self.by == "mean" else usual.sum() if self.by == "sum" else usual.max()
        return scores / scale.clamp_min(1e-30)


@dataclass(frozen=True)
class Lamp:
    """w_j² / Σ w_k² over the units k of the group with w_k² ≥ w_j², where w_j² is the sum of squares of a unit.

    The largest unit of every group has score 1, so that a global ranking never empties a layer. Of equal units the higher
    index counts as the smaller one.

    Args:
        coupled: Whether the entries that read a unit count too.

    Source: Lee et al., Layer-adaptive Sparsity for the Magnitude-based Pruning, ICLR 2021, there for single weights.
    """

    coupled: bool = field(default=False, kw_only=True)

    comparable: ClassVar[bool] = True

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:
        """Divide each unit's squares by those of the units that are at least as large."""
        return Normalised(Magnitude(order=2, coupled=self.coupled), by="share_of_remaining").scores(graph, context)
