"""Normalised: scores divided by the mean of their group, so that groups can be compared."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparsekit.criteria.base import Criterion, ScoringContext, is_learned, score_units
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import wide


@dataclass(frozen=True)
class Normalised:
    """Divide the scores of each group by the mean of their absolute values, so that one ranking can be made of all units.

    Layers differ in the scale of their weights and gradients by more than units of a layer do. Without division a global
    ranking empties the layers of small scale.

    Args:
        criterion: Computes the importance of units.

    Source: as in Torch-Pruning (Fang et al., DepGraph, CVPR 2023), whose global ranking divides so by default.
    """

    criterion: Criterion

    comparable: ClassVar[bool] = True

    @property
    def learned(self) -> bool:
        """As the criterion's."""
        return is_learned(self.criterion)

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:
        """Divide the criterion's scores; the order within each group stays."""
        found = {name: wide(scores.detach()) for name, scores in score_units(self.criterion, graph, context).items()}
        return {name: scores / scores.abs().mean().clamp_min(1e-30) for name, scores in found.items()}
