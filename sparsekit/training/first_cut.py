"""The cut with which a learnable mask begins: units, widths and weights of a pruned model."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsekit.allocation.saliency import Scale
from sparsekit.allocation.shares import by_ratio
from sparsekit.criteria.base import Criterion, ScoringContext, is_comparable, score_units
from sparsekit.criteria.batches import Batch, Loss
from sparsekit.criteria.by_name import as_criterion
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import StateDict
from sparsekit.measure.budget import Budget
from sparsekit.pruning.prune import CANDIDATES, prune
from sparsekit.pruning.result import Pruned
from sparsekit.pruning.trained import UncalibratedWarning, signs_of_training
from sparsekit.surgery.compaction import expand
from sparsekit.training.narrow_model import Rules
from sparsekit.training.rule import MaskedModule


@dataclass(frozen=True, eq=False)
class FirstCut:
    """What a mask begins with.

    Args:
        state: The dense state, in which kept units have the weights of the pruned model.
        counts: Group name → units that are kept.
        importance: float (J,), of all units; the kept ones have the largest of their group.
    """

    state: dict[str, Tensor]
    counts: Mapping[str, int]
    importance: Tensor

    @classmethod
    def of(cls, pruned: Pruned, dense: nn.Module) -> FirstCut:
        """Read it from a pruned model and the dense one, whose weights dropped units keep.

        Raises:
            InvalidValueError: the result of a dry run, which has no small model.
            ForeignMaskError: `dense` is not the model that was pruned.
        """
        if pruned.model is dense:
            raise InvalidValueError("prune(dry_run=True) makes no small model to begin with; prune without dry_run")
        state = expand(pruned.model.state_dict(), pruned.graph, pruned.mask, into=dense.state_dict())
        return cls(state, pruned.mask.counts(), _importance(pruned))


class MaskFromPruned(MaskedModule):
    """How a learnable mask begins with a cut."""

    @classmethod
    def from_pruned(cls, pruned: Pruned, dense: nn.Module, example_inputs: Any = None, **options: Any) -> Self:
        """Begin with a model that `prune` has made, with its weights, widths and units.

        ```python
        pruned = sk.prune(model, (x,), budget="flops=50%", batches=loader, loss=F.cross_entropy)
        masked = sk.LearnableMask.from_pruned(pruned, model, explore=0.1)
        ```

        Args:
            pruned: The result; its model may have been trained since.
            dense: The model that was pruned. Dropped units have its weights when they enter the mask.
            example_inputs: Needed with `budget` alone, within which the widths are then learned. Without a budget every group
                keeps its number of units.
            **options: Further arguments of `LearnableMask`, such as `explore`, `steps`, `learning`, `budget` and `rules`.

        Returns:
            A mask whose outputs are those of `pruned.model`.

        Raises:
            InvalidValueError: the result of a dry run.
            ForeignMaskError: `dense` is another model.
        """
        cut = FirstCut.of(pruned, dense)
        masked = cls(dense, example_inputs, graph=pruned.graph, start=pruned.scores[pruned.report.criterion], **options)
        masked._begin(cut)
        return masked

    @abstractmethod
    def load(self, state: StateDict, *, importance: Tensor | None = None) -> None:
        """Begin a training from a dense state; the units of the largest importance are kept."""

    def _begin(self, cut: FirstCut) -> None:
        if cut.counts != self.widths.counts():
            self.widths.set(cut.counts)
        self.load(cut.state, importance=cut.importance.to(self.scores))


def _importance(pruned: Pruned) -> Tensor:
    """Scores of the criterion that was chosen; kept units that others exceed, as after several steps, are raised above them."""
    scores = pruned.scores[pruned.report.criterion].values
    found = []
    for name in pruned.graph.groups:
        own, keep = scores[name].float(), pruned.mask[name].to(scores[name].device)
        if not keep.all() and (missing := own[~keep].max() - own[keep].min()) >= 0:
            own = torch.where(keep, own + missing + 1e-4 * own.abs().max() + 1e-12, own)
        found.append(own)
    return torch.cat(found) if found else torch.zeros(0)


def first_cut(
    model: nn.Module,
    example_inputs: Any,
    graph: UnitGraph,
    *,
    ratio: float,
    budget: Budget | None,
    batches: Iterable[Batch],
    loss: Loss | None,
    start: Criterion | str | None,
    rules: Rules | None,
) -> FirstCut:
    """Prune a copy as `prune` does with batches: to a budget, or to one ratio for all groups.

    Raises:
        InvalidValueError: no example inputs, or neither a ratio below 1 nor a budget.
    """
    if example_inputs is None:
        raise InvalidValueError("batches= cut the model before training, which needs example_inputs=(x,)")
    if budget is None and ratio == 1.0:
        raise InvalidValueError("batches= choose what a ratio below 1 or a budget keeps; pass one of the two")
    options: dict[str, Any] = {"criterion": start, "budget": budget}
    if budget is None:
        named = list(dict.fromkeys(criterion for criterion, _ in CANDIDATES)) if start is None else start
        options = {"criterion": named, "allocation": partial(by_ratio, ratios=ratio), "multiple_of": 1}
    pruned = prune(model, example_inputs, batches=batches, loss=loss, graph=graph, rules=rules, **options)
    return FirstCut.of(pruned, model)


def first_scores(
    start: Criterion | str, model: nn.Module, graph: UnitGraph, generator: torch.Generator | None
) -> tuple[Tensor, Scale]:
    """Score all units by a criterion or its name: float64 (J,), and the scale on which groups are compared by these scores."""
    criterion = as_criterion(start)
    context = ScoringContext(weights=model.state_dict(), generator=generator, model=model)
    scores = score_units(criterion, graph, context)
    return torch.cat([scores[name].cpu().double() for name in graph.groups]), "none" if is_comparable(criterion) else "relative"


def warn_without_data(model: nn.Module) -> None:
    """Say that the first mask of a trained network is chosen without data, and what to pass.

    Warns:
        UncalibratedWarning: the network shows signs of training.
    """
    if (signs := signs_of_training(model)) is not None:
        warnings.warn(
            f"{type(model).__name__} was trained ({signs}), but its first mask is chosen without data and nothing is"
            " reconstructed: trained networks usually begin at chance then. Pass batches= (a dozen batches) and loss=, or take"
            " LearnableMask.from_pruned",
            UncalibratedWarning,
            stacklevel=3,
        )
