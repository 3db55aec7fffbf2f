"""The rules of importance: what one uses of a learnable mask, what it has to do, and the rule of the paper.

`loss_importance.py` has the default rule.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparsekit._torch import identity
from sparsekit.allocation.by_cost import by_cost
from sparsekit.allocation.masks import mask_from_scores
from sparsekit.allocation.problem import allocate
from sparsekit.allocation.saliency import Scale
from sparsekit.allocation.shares import check_ratio, ratio_counts
from sparsekit.errors import ForeignMaskError, InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import wide
from sparsekit.graph.mask import UnitMask
from sparsekit.measure.budget import Budget
from sparsekit.measure.cost import CostModel
from sparsekit.training.exploration import WidePasses
from sparsekit.training.narrow_model import NarrowModel
from sparsekit.training.optimizers import OptimizerSet
from sparsekit.training.unit_vectors import UnitVectors, split_units, unit_tables

Target = Literal["standardised", "absolute"]


class Widths:
    """How many units of each group stay.

    Args:
        graph: The units.
        ratio: Share of units that stay in each group, until `set` gives each group a number of its own.
        budget: The largest cost; None if the ratio decides.
        costs: The cost of the model by its widths; None if it is not known.
    """

    def __init__(self, graph: UnitGraph, ratio: float, budget: Budget | None, costs: CostModel | None) -> None:
        self.graph = graph
        self.budget = budget
        self._costs = costs
        self._counts: dict[str, int] | None = None
        self._ratio = check_ratio(ratio)
        self.target: object = ratio
        """What the counts follow from: compares unequal when they change."""

    @property
    def ratio(self) -> float:
        """Share of units that stay in each group; within a budget, of all units."""
        return self._ratio if self._counts is None else sum(self._counts.values()) / self.graph.units

    @ratio.setter
    def ratio(self, ratio: float) -> None:
        if self.budget is not None:
            raise InvalidValueError("this mask has a budget, which says how many units stay; make one with ratio= instead")
        self.target = self._ratio = check_ratio(ratio)
        self._counts = None

    def counts(self) -> Mapping[str, int]:
        """Group name → units that stay."""
        return ratio_counts(self.graph, self._ratio) if self._counts is None else self._counts

    def set(self, counts: Mapping[str, int]) -> None:
        """Give each group its own number of units."""
        self.target = self._counts = dict(counts)

    def within_budget(
        self, importance: Tensor, limits: Mapping[str, tuple[float, float]], scale: Scale = "none"
    ) -> Mapping[str, int]:
        """Return the counts within the budget at which the groups lose least.

        `importance`, float (J,), is in units of the loss, in the order of the graph's groups, and compared between them by
        `scale`; `limits` are group name → (least, largest) share of its units that stays.
        """
        assert self.budget is not None
        assert self._costs is not None
        # Training continues, so that up to a point the remaining units of a group take over from the others.
        rule = partial(by_cost, scale=scale, width_penalty=2.0)
        scores = split_units(self.graph, importance)
        return allocate(rule, self.graph, scores, self._costs, budget=self.budget, limits=limits)

    def pass_flops(self, mask: UnitMask) -> float:
        """Work of a pass under `mask`: FLOPs if the costs are known, else its share of the parameters."""
        return mask.density(self.graph) if self._costs is None else self._costs.costs(mask.counts())["flops"]


class MaskedModule(nn.Module, ABC):
    """What a rule uses of a learnable mask, and what both have of importance and widths."""

    graph: UnitGraph
    model: nn.Module
    """The narrow module."""
    scores: Tensor
    """Importance of every unit, float (J,), in the order of the graph's groups."""
    widths: Widths
    """How many units of each group stay."""
    optimizers: OptimizerSet
    """The optimizers that follow the mask, and other objects with state for the leaves."""
    distributed: bool
    """Whether every parameter must take part in every step, as DistributedDataParallel demands."""
    narrow_model: NarrowModel
    wide_passes: WidePasses

    @property
    @abstractmethod
    def vectors(self) -> UnitVectors:
        """Vectors over the units."""

    @property
    def ratio(self) -> float:
        """Share of units kept in each group, in (0, 1]; with a budget, of all units.

        Assign to change it; the next call changes the mask.

        Raises:
            InvalidValueError: assigned where a budget says what is kept.
        """
        return self.widths.ratio

    @ratio.setter
    def ratio(self, ratio: float) -> None:
        self.widths.ratio = ratio

    @property
    def budget(self) -> Budget | None:
        """What the sparse model may cost; None if the ratio says what is kept."""
        return self.widths.budget

    def importance(self) -> dict[str, Tensor]:
        """Group name → float (units,): copies of the present importance."""
        return {name: part.clone() for name, part in split_units(self.graph, self.scores).items()}

    def importance_vector(self) -> Tensor:
        """Return the present importance of all units, float (J,), in the order of the graph's groups; a copy."""
        return self.scores.clone()

    def load_importance(self, importance: Mapping[str, Tensor]) -> None:
        """Set the importance of some or all groups.

        Raises:
            ForeignMaskError: an unknown group or another number of units.
            InvalidValueError: a value is NaN or infinite.
        """
        parts = split_units(self.graph, self.scores)
        for name, values in importance.items():
            if name not in parts or values.shape != parts[name].shape:
                expected = {group.name: group.size for group in self.graph.groups.values()}
                raise ForeignMaskError(f"importance of {name!r} has shape {tuple(values.shape)}; groups and sizes: {expected}")
            if not bool(torch.isfinite(values).all()):
                raise InvalidValueError(f"importance of {name!r} must be finite")
        with torch.no_grad():
            for name, values in importance.items():
                parts[name].copy_(values)

    @abstractmethod
    def change_mask(self, mask: UnitMask) -> None:
        """Change the mask; weights and optimizer state follow.

        Raises:
            InvalidValueError: an optimizer is in the middle of a step, or keeps a history that cannot follow.
        """


class Rule:
    """The rule of one learnable mask, with its memory. The base learns nothing, for a mask that was given and stays."""

    @property
    def converged(self) -> bool:
        """Whether the mask will not change again by itself."""
        return True

    @property
    def exploration_cost(self) -> float:
        """Work of exploration so far, as a share of the work of all training passes."""
        return 0.0

    def apply_pending(self, masked: MaskedModule) -> None:
        """Change the mask if it is due."""

    def begin(self, masked: MaskedModule) -> None:
        """Choose the first mask, of the units of the largest importance."""

    def call(self, masked: MaskedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change the mask if it is due, and run the sparse model."""
        return masked.narrow_model.run(args, kwargs)

    def update_importance(
        self, masked: MaskedModule, gradients: Mapping[Tensor, Tensor] | None, scale: Tensor | None = None
    ) -> None:
        """End a step: learn from the gradients of the weights.

        Args:
            masked: The learnable mask.
            gradients: Leaf → gradient; None takes `.grad` of the leaves.
            scale: The factor of a GradScaler that they still contain.
        """

    def state(self) -> dict[str, Tensor]:
        """Return its memory, to be saved."""
        return {}

    def load(self, masked: MaskedModule, state: dict[str, Tensor]) -> None:
        """Continue from what `state` returned, or from nothing if that is empty."""

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Move or cast every tensor of its memory."""


@dataclass(frozen=True, kw_only=True)
class ImportanceRegularizer:
    """The regulariser λ‖Q − σ(|θ|_J)‖², which pulls importance towards a target that follows the weights.

    Args:
        strength: λ in the paper.
        target: "standardised": sigmoid of the absolute sums after each group's mean and deviation are removed;
            "absolute": sigmoid of the absolute sums, as in the paper (close to 1 for every unit of a wide network).

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), importance regularisation term; the standardised target is ours.
    """

    strength: float = 1.0
    target: Target = "standardised"

    def __post_init__(self) -> None:
        if not 0.0 <= self.strength < float("inf"):
            raise InvalidValueError(f"strength must be a finite number >= 0, got {self.strength}")
        if self.target not in ("standardised", "absolute"):
            raise InvalidValueError(f"target must be 'standardised' or 'absolute', got {self.target!r}")

    def targets(self, magnitudes: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the target of every unit, a constant for the gradient.

        Args:
            magnitudes: float (J,), Σ |θ| of each unit, groups one after the other.
            sizes: Units of each group.

        Returns:
            float (J,) in [0, 1], float32 at least.
        """
        if self.target == "standardised":
            magnitudes = standardise(magnitudes, *unit_tables(tuple(sizes), magnitudes.device))
        return torch.sigmoid(wide(magnitudes))


def standardise(values: Tensor, group_of: Tensor, sizes: Tensor) -> Tensor:
    """Subtract each group's mean and divide by its standard deviation.

    Args:
        values: float (J,).
        group_of: int64 (J,), the group of each value, from 0.
        sizes: int64 (groups,), the number of values in each.

    Returns:
        float (J,), float32 at least; 0 throughout a group whose values are all equal.
    """
    values = wide(values)
    counts = sizes.to(values.dtype)
    mean = values.new_zeros(sizes.numel()).index_add_(0, group_of, values) / counts
    centred = values - mean[group_of]
    variance = values.new_zeros(sizes.numel()).index_add_(0, group_of, centred * centred) / counts
    return centred / (variance.sqrt() + 1e-12)[group_of]


class Learning(ABC):
    """The settings of a rule: what `LearnableMask(learning=…)` takes."""

    regularizer: ImportanceRegularizer = ImportanceRegularizer()

    def targets(self, graph: UnitGraph, magnitudes: Tensor) -> Tensor:
        """Return the initial importance, float (J,), of units with these magnitudes."""
        return self.regularizer.targets(magnitudes, [group.size for group in graph.groups.values()])

    @abstractmethod
    def rule(self, masked: MaskedModule) -> Rule:
        """Return a new rule for `masked`."""


def resized_mask(graph: UnitGraph, mask: UnitMask, scores: Tensor, counts: Mapping[str, int]) -> UnitMask:
    """Drop the least important units of a mask, or add the most important others, until `counts` is met.

    `scores`, float (J,), is the importance of each unit; ties go to the lower index.
    """
    keep = dict(mask)
    for name, score in split_units(graph, scores.cpu()).items():
        rank = torch.where(mask[name], score + (score.max() - score.min() + 1.0), score)
        chosen = rank.argsort(descending=True, stable=True)[: counts[name]]
        keep[name] = torch.zeros_like(mask[name]).index_fill_(0, chosen, True)
    return UnitMask(keep)


@dataclass(frozen=True, kw_only=True)
class GradientImportance(Learning):
    """Step importance along the gradient of each unit's gate, pulled by a regulariser, after every step of the weights.

    The mask follows where the order of importance has changed. Both gradients are computed in closed form from those of the
    weights, so optimisers need not know importance. Dropped units learn from the regulariser alone.

    ```python
    masked = sk.LearnableMask(model, (x,), ratio=0.25, learning=sk.GradientImportance(lr=0.02))
    optimizer = torch.optim.AdamW(masked.parameters())
    ```

    Args:
        regularizer: Pulls importance towards a target that follows the weights.
        lr: Learning rate of importance. Where gradients of the weights are clipped, call `masked.update_importance()` before.
        refresh_every: Importance takes a step after every step of the weights, but its target and the gradient of the gates
            are computed from the weights only at every n-th step and after a change of the mask, and reused in between. 1 is
            the algorithm of the paper; computed every time, they take a tenth of the time of a small step.

    Raises:
        InvalidValueError: `lr` below 0 or infinite, or `refresh_every` below 1.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), learnable sparse training; straight-through on kept units.
    """

    regularizer: ImportanceRegularizer = field(default_factory=ImportanceRegularizer)
    lr: float = 0.02
    refresh_every: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.refresh_every, int) or self.refresh_every < 1:
            raise InvalidValueError(f"refresh_every must be a whole number >= 1, got {self.refresh_every!r}")
        if not 0.0 <= self.lr < math.inf:
            raise InvalidValueError(f"lr must be a finite number >= 0, got {self.lr}")

    def rule(self, masked: MaskedModule) -> GradientImportanceRule:
        if masked.budget is not None:
            raise InvalidValueError(
                "budget= needs importance that can be compared between groups, which GradientImportance does not learn, so that"
                " widths would never move; use learning=LossImportance(…), or ratio="
            )
        return GradientImportanceRule(self, masked)


class GradientImportanceRule(Rule):
    """Lets the mask follow importance after every step."""

    def __init__(self, settings: GradientImportance, masked: MaskedModule) -> None:
        self.settings = settings
        self._sizes = [group.size for group in masked.graph.groups.values()]
        self._seen: tuple[object, ...] = ()
        """Widths and version of the scores for which the mask was last chosen."""
        self._learned = False
        """Whether importance has taken the step that goes with the latest pass."""
        self._target: Tensor | None = None
        self._gates: Tensor | None = None
        """∂L/∂gate of each unit, 0 of dropped ones, as it was last computed."""
        self._gates_of = -1
        """The version of the narrow model for which it was computed."""
        self._age = 0

    @property
    def converged(self) -> bool:
        return False

    def call(self, masked: MaskedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.apply_pending(masked)
        return masked.narrow_model.run(args, kwargs)

    def _now(self, masked: MaskedModule) -> tuple[object, ...]:
        return masked.widths.target, *identity(masked.scores)

    def begin(self, masked: MaskedModule) -> None:
        self.apply_pending(masked)

    def apply_pending(self, masked: MaskedModule) -> None:
        self._learned = False
        now = self._now(masked)
        if now == self._seen or masked.optimizers.frozen:  # in the middle of a step
            return
        # Without sorting if the mask stays, as in most steps. What is made here outlives the call: tensors of inference mode
        # could not be trained on later.
        with torch.inference_mode(False), torch.no_grad():
            if self._seen[:1] != now[:1] or not masked.vectors.mask_unchanged(masked.scores):
                scores = split_units(masked.graph, masked.scores)
                mask = mask_from_scores(masked.graph, scores, masked.widths.counts(), source="Learned scores")
                if mask != masked.narrow_model.mask:
                    masked.change_mask(mask)
            self._seen = now

    def _recent(
        self, masked: MaskedModule, gradients: Mapping[Tensor, Tensor] | None, scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the targets and the gates' gradient, computed again when due; the latter also after a change of the mask."""
        vectors, due = masked.vectors, self._age % self.settings.refresh_every == 0
        self._age += 1
        if self._target is None or due:
            self._target = self.settings.regularizer.targets(vectors.magnitudes(), self._sizes).to(masked.scores.dtype)
        version = masked.narrow_model.version
        if self._gates is None or due or self._gates_of != version:
            gates, self._gates_of = vectors.gate_gradient(gradients), version
            self._gates = (gates if scale is None else gates / scale).to(self._target)
        return self._target, self._gates

    def update_importance(
        self, masked: MaskedModule, gradients: Mapping[Tensor, Tensor] | None, scale: Tensor | None = None
    ) -> None:
        if self._learned:
            return
        self._learned = True
        with torch.no_grad():
            target, gates = self._recent(masked, gradients, scale)
            gradient = (masked.scores - target).mul_(2.0 * self.settings.regularizer.strength).add_(gates)
            masked.scores.sub_(gradient, alpha=self.settings.lr)

    def state(self) -> dict[str, Tensor]:
        read = {"target": self._target, "gates": self._gates}
        return {"age": torch.tensor(self._age), **{name: each.clone() for name, each in read.items() if each is not None}}

    def load(self, masked: MaskedModule, state: dict[str, Tensor]) -> None:
        self._age = int(state.get("age", 0))
        self._target, self._gates = (
            None if name not in state else state[name].to(masked.scores, copy=True) for name in ("target", "gates")
        )
        self._gates_of = masked.narrow_model.version
        self._seen = self._now(masked)

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(function(tensor).device)

        self._target, self._gates = moved(self._target), moved(self._gates)
