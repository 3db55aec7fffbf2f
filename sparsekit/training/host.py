"""Host: what a learnable mask gives its rule and its optimisers; Rule: how it learns importance and changes its mask."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsekit.allocation.by_cost import by_cost
from sparsekit.allocation.problem import allocate
from sparsekit.allocation.saliency import Scale
from sparsekit.allocation.shares import check_ratio, ratio_counts
from sparsekit.criteria.base import Criterion
from sparsekit.criteria.orders import Learned
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.measure.budget import Budget
from sparsekit.measure.cost import CostModel
from sparsekit.surgery.optimizer_state import HasState
from sparsekit.training.execution import Execution
from sparsekit.training.optimizer_hooks import OptimizerSet, has_begun, holds, introduce, refuse_history, restored


def split_units(graph: UnitGraph, fused: Tensor) -> dict[str, Tensor]:
    """Views of a vector over all units, float (J,), by group: group name → (units,)."""
    parts = fused.split([group.size for group in graph.groups.values()])
    return dict(zip(graph.groups, parts, strict=True))


class Host(nn.Module):
    """The model under a mask, without the rule by which the mask changes; the arguments are those of `LearnableMask`.

    `costs` are None where no example inputs were given, and so is `criterion` where worth is learned.
    """

    scores: nn.Parameter

    def __init__(
        self,
        execution: Execution,
        ratio: float,
        budget: Budget | None,
        costs: CostModel | None,
        criterion: Criterion | None,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.graph = execution.graph
        self.budget = budget
        self.criterion: Criterion = Learned() if criterion is None else criterion
        self.generator = generator
        self.optimizers = OptimizerSet()
        self.joined = False
        """Whether every parameter must take part in every step, as DistributedDataParallel demands."""
        self.model = execution.module
        self.execution = execution
        """What runs the model; for rules."""
        self._ratio = ratio
        self._widths: dict[str, int] | None = None
        self._costs = costs
        self._moved = False
        """Whether the mask has changed since an optimiser may have been loaded."""

    @property
    def ratio(self) -> float:
        """Share of units kept in each group, in (0, 1]; with a budget, of all units.

        Assign to change it; the next call changes the mask.

        Raises:
            InvalidValueError: assigned where a budget says what is kept.
        """
        return self._ratio if self._widths is None else sum(self._widths.values()) / self.graph.units

    @ratio.setter
    def ratio(self, ratio: float) -> None:
        if self._widths is not None:
            raise InvalidValueError("this mask has a budget, which says how many units stay; make one with ratio= instead")
        self._ratio = check_ratio(ratio)

    @property
    def target(self) -> object:
        """What the counts follow from, for rules: compares unequal when they change."""
        return self._ratio if self._widths is None else self._widths

    def counts(self) -> Mapping[str, int]:
        """Group name → units that the present ratio or the present widths keep."""
        return ratio_counts(self.graph, self._ratio) if self._widths is None else self._widths

    def within_budget(
        self, worth: Tensor, limits: Mapping[str, tuple[float, float]], scale: Scale = "none"
    ) -> Mapping[str, int]:
        """The counts within the budget at which the groups lose least, for rules.

        `worth`, float (J,), is in units of the loss, in the order of the graph's groups, and compared between them by `scale`;
        `limits` are group name → (least, largest) share of its units that stays.
        """
        assert self.budget is not None
        # Training goes on, so what stays of a group takes over from what goes, up to a point.
        assert self._costs is not None
        rule = partial(by_cost, scale=scale, width_penalty=2.0)
        scores = split_units(self.graph, worth)
        return allocate(rule, self.graph, scores, self._costs, budget=self.budget, limits=limits)

    def set_widths(self, widths: Mapping[str, int]) -> None:
        """Change the widths within the budget, for rules."""
        self._widths = dict(widths)

    def pass_flops(self, mask: UnitMask) -> float:
        """Work of a pass under `mask`, for rules: FLOPs where example inputs were given, else it grows about as the entries."""
        return mask.density(self.graph) if self._costs is None else self._costs.costs(mask.counts())["flops"]

    def change(self, mask: UnitMask) -> None:
        """Change the mask, for rules: weights and optimiser state follow."""
        refuse_history(self.optimizers, self.weights())
        self._moved = True
        self.execution.fused.set_mask(mask, list(self.optimizers))
        restored.difference_update(self.optimizers)

    def weights(self) -> list[nn.Parameter]:
        """The narrow weights: all `parameters()` but the importance, such as for `torch.nn.utils.clip_grad_norm_`."""
        return list(self.model.parameters())

    def param_groups(self, *, importance_lr: float | None = None, weight_decay: float | None = None) -> list[dict[str, Any]]:
        """Parameter groups for an optimiser that keep importance out of weight decay.

        An optimiser over plain `parameters()` decays importance as it does weights, and `clip_grad_norm_` over them counts
        the gradients of importance.

        ```python
        optimizer = torch.optim.AdamW(masked.param_groups(importance_lr=0.01, weight_decay=0.05), lr=1e-3)
        loss = F.cross_entropy(masked(x), y) + masked.penalty()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(masked.weights(), 1.0)
        optimizer.step()
        ```

        Args:
            importance_lr: Learning rate of the importance; None takes the optimiser's own.
            weight_decay: Weight decay of the weights; None takes the optimiser's own. That of importance is 0.

        Returns:
            Two groups: the weights, then the importance.

        Raises:
            InvalidValueError: a number below 0, infinite or NaN.
        """
        for name, value in (("importance_lr", importance_lr), ("weight_decay", weight_decay)):
            if value is not None and not 0.0 <= value < math.inf:
                raise InvalidValueError(f"{name} must be a finite number >= 0 or None, got {value}")
        weights: dict[str, Any] = {"params": self.weights()}
        importance: dict[str, Any] = {"params": [self.scores], "weight_decay": 0.0}
        if weight_decay is not None:
            weights["weight_decay"] = weight_decay
        if importance_lr is not None:
            importance["lr"] = importance_lr
        return [weights, importance]

    def leaves(self) -> list[nn.Parameter]:
        """The parameters whose optimisers follow the mask, and the importance."""
        return [*self.weights(), self.scores]

    def track(self, optimizer: HasState) -> None:
        """Let the state of `optimizer` follow the mask from now on.

        A torch optimiser is met at its first step and needs no such call, unless it has state before that, as one that was
        loaded or copied: then call this before the mask or the ratio changes. Any other object may keep tensors that follow the
        units: `state[leaf][name]`, each of the leaf's shape.

        When the mask changes, units that stay keep their state; units that enter start with fresh state. Optimisers that are
        not torch's own, or whose state is not one value for each weight (`Adafactor`, `AdamW8bit`), begin anew with every
        weight matrix whose units change. `LBFGS` is refused when the mask changes.

        Args:
            optimizer: Steps some of `parameters()`, or has state for them; held weakly.

        Raises:
            InvalidValueError: `optimizer` steps none of them.
        """
        if hasattr(optimizer, "param_groups") and not any(holds(optimizer, leaf) for leaf in self.leaves()):
            raise InvalidValueError(
                f"this {type(optimizer).__name__} steps no parameter of the mask; make it over masked.parameters()"
            )
        self.optimizers.add(optimizer)
        if isinstance(optimizer, Optimizer):
            introduce(optimizer)

    def held(self) -> AbstractContextManager[None]:
        """Keep the mask as it is within a block, in which an optimiser steps in two parts.

        ```python
        with masked.held():
            sam.first_step()
            F.cross_entropy(masked(x), y).backward()
            sam.second_step()
        ```
        """
        return self.optimizers.held()

    def meet(self, optimizer: Optimizer) -> None:
        """Called when an optimiser over `parameters()` steps for the first time, or was loaded.

        Raises:
            InvalidValueError: it has state, and the mask has changed since that may have been loaded.
        """
        unknown = self._moved and optimizer not in self.optimizers
        if unknown and any(has_begun(optimizer.state.get(leaf) or {}, leaf) for leaf in self.weights()):
            raise InvalidValueError(
                f"this {type(optimizer).__name__} has state from before the last change of the mask, which could not follow;"
                " call masked.track(optimizer) when its state is loaded"
            )
        self.track(optimizer)


class Rule:
    """The rule of one learnable mask, with what it remembers; the base learns nothing, for a mask that was given and stays."""

    @property
    def settled(self) -> bool:
        """Whether the mask will not change again by itself."""
        return True

    @property
    def explored(self) -> float:
        """Work of exploration so far as a share of the training passes' own work."""
        return 0.0

    def sync(self, host: Host) -> None:
        """Change the mask where it is due."""

    def resample(self, host: Host) -> None:
        """Ask the criterion again and change the mask to what it says."""

    def call(self, host: Host, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the sparse model."""
        return host.model(*args, **kwargs)

    def learn(self, host: Host, gradients: Mapping[Tensor, Tensor] | None, scale: Tensor | None = None) -> None:
        """End a step: learn from the gradients of the weights.

        Args:
            host: The learnable mask.
            gradients: Leaf → gradient; None reads `.grad` of the leaves.
            scale: The factor of a GradScaler that they still have.
        """

    def penalty(self, host: Host) -> Tensor:
        """What the rule adds to the loss: a scalar."""
        return host.scores.new_zeros(())

    def after_step(self, host: Host, optimizer: Optimizer) -> None:
        """After `optimizer` changed parameters of the mask."""

    def state(self) -> dict[str, Tensor]:
        """What it remembers, to be saved."""
        return {}

    def load(self, host: Host, state: dict[str, Tensor]) -> None:
        """Go on from what `state` returned, or from nothing if that is empty."""

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Move or cast every tensor that it remembers."""


class Learning(ABC):
    """The settings of a rule: what `LearnableMask(learning=…)` takes."""

    explore: float

    @abstractmethod
    def rule(self, host: Host) -> Rule:
        """Return a new rule for `host`."""


def check_explore(explore: float) -> None:
    """Raise InvalidValueError unless `explore` is in [0, 1]."""
    if not 0.0 <= explore <= 1.0:
        raise InvalidValueError(f"explore must be in [0, 1], got {explore}; it is a share of extra work, 0.1 is 10 % more")


def refilled(graph: UnitGraph, mask: UnitMask, scores: Tensor, counts: Mapping[str, int]) -> UnitMask:
    """The mask with as many units as `counts` says: the least worth go, or the most worth come; nobody else moves.

    `scores`, float (J,), is what each unit is worth; ties go to the lower index.
    """
    keep = dict(mask)
    for name, score in split_units(graph, scores.cpu()).items():
        rank = torch.where(mask[name], score + (score.max() - score.min() + 1.0), score)
        chosen = rank.argsort(descending=True, stable=True)[: counts[name]]
        keep[name] = torch.zeros_like(mask[name]).index_fill_(0, chosen, True)
    return UnitMask(keep)
