"""Examples: what data are good for when a model is cut: they score its units, and repair what the cut has damaged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import nn

from sparsekit.criteria import registry as criteria
from sparsekit.criteria.base import Criterion
from sparsekit.criteria.batches import Batch, Loss
from sparsekit.criteria.fisher import Fisher
from sparsekit.finetuning.compensation import compensate
from sparsekit.finetuning.recalibration import recalibrate
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask

__all__ = ["Examples", "reads_data"]

_SCORING, _COMPENSATING, _RECALIBRATING = 40, 20, 50


def reads_data(kind: object) -> bool:
    """Whether a criterion's class takes batches."""
    return isinstance(kind, type) and is_dataclass(kind) and "batches" in {item.name for item in fields(kind)}


@dataclass(frozen=True, eq=False)
class Examples:
    """Batches and a loss.

    Args:
        batches: Training data that can be read again, as for data-driven criteria.
        loss: `loss(outputs, target)`; None takes `outputs.loss`.
        limit: Batches that criteria score on at most.
        repair: Whether a cut model is repaired.
        progress: Whether to draw progress bars on stderr.
    """

    batches: Iterable[Batch]
    loss: Loss | None = None
    limit: int = _SCORING
    repair: bool = True
    progress: bool = False

    def criterion(self, criterion: Criterion | str | None) -> Criterion | str:
        """The criterion, with the data where it is a name that stands for one that reads data; `Fisher` where none is given.

        Raises:
            UnknownNameError: no such criterion.
        """
        if criterion is not None and not isinstance(criterion, str):
            return criterion
        kind: Any = Fisher if criterion is None else criteria.find(criterion)
        if not reads_data(kind):
            return criterion or kind()
        given = {"batches": self.batches, "loss": self.loss, "limit": self.limit, "progress": self.progress}
        names = {item.name for item in fields(kind)}
        made: Criterion = kind(**{name: value for name, value in given.items() if name in names})
        return made

    def after_cut(self, before: nn.Module, small: nn.Module, graph: UnitGraph, mask: UnitMask) -> dict[str, float]:
        """Refit the layers that read dropped units, then estimate the statistics of batch norms anew.

        Args:
            before: The model that was cut.
            small: What came of it; changed in place.
            graph: The units of `before`.
            mask: What was kept.

        Returns:
            As `compensate`: layer → share of its error that is left.
        """
        if not self.repair or all(bool(keep.all()) for keep in mask.values()):
            return {}
        left = compensate(before, small, graph, mask, self.batches, limit=_COMPENSATING, progress=self.progress)
        recalibrate(small, self.batches, limit=_RECALIBRATING, progress=self.progress)
        return left
