"""UnitWorth: learns what a client's units are worth on its own data, in units of loss, while it trains a narrow model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsekit.allocation.choose import choose
from sparsekit.allocation.uniform import Uniform
from sparsekit.criteria.base import Criterion
from sparsekit.criteria.learned import Learned
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.measure.budget import Budget
from sparsekit.surgery.optimizer_state import HasState
from sparsekit.training.execution import Collect, CompactExecution
from sparsekit.training.loss_importance import LossImportance
from sparsekit.training.narrow_model import NarrowModel
from sparsekit.training.optimizer_hooks import OptimizerSet
from sparsekit.training.rule import split_units
from sparsekit_fl.training.loop import Batch

__all__ = ["UnitWorth", "first_mask"]

_UNKNOWN = 2.0
"""What is taken from the targets, in (0, 1), of units that were not measured: any nats that were measured rank above."""


def first_mask(graph: UnitGraph, targets: Tensor, ratio: float, memory: Mapping[str, Any]) -> UnitMask:
    """Choose a client's mask at the start of a round.

    First come measured units that were kept when the client last trained, then the other measured ones by what they are worth,
    then those that were never measured by their targets, which are the server's knowledge of them.

    Args:
        graph: The units.
        targets: float (J,), in (0, 1): of the weights that the server sent.
        ratio: Share of units kept in each group.
        memory: What `UnitWorth.save` left behind; empty before the first round.
    """
    scores = _scores(targets, memory)
    if memory:
        kept = torch.cat([memory["mask"][name] for name in graph.groups]).to(scores.device)
        bonus = float(scores.max() - scores.min()) + 1.0
        scores = torch.where(kept & memory["measured"].to(scores.device), scores + bonus, scores)
    return choose(graph, split_units(graph, scores), Uniform(ratio).counts(graph, {}), source="worth")


def _scores(targets: Tensor, memory: Mapping[str, Any]) -> Tensor:
    unknown = targets - _UNKNOWN
    if not memory:
        return unknown
    return torch.where(memory["measured"].to(targets.device), memory["worth"].to(targets), unknown)


class _Followers(OptimizerSet):
    """The client's optimiser, for rules."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[HasState] = []

    def __iter__(self) -> Iterator[Optimizer]:
        return iter([cast(Optimizer, owner) for owner in self.found])


class _Execution(CompactExecution):
    """Runs a client's narrow model; gates are read from the gradients of the leaves, so that a plain pass stays plain."""

    def __init__(self, narrow_model: NarrowModel) -> None:
        super().__init__(narrow_model.module, narrow_model.graph, narrow_model)
        self.loss_scale: Callable[[], float] = lambda: 1.0
        self.passes: list[tuple[UnitMask, UnitMask, int]] = []
        """The wide mask, the narrow mask and the number of examples of each exploring pass."""
        self.examples = 0
        """Of the present batch."""

    def call(self, scores: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], *, explore: float) -> Any:
        del scores, explore
        return self.module(*args, **kwargs)

    def explore(self, scores: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], wide: UnitMask, collect: Collect) -> Any:
        self.passes.append((wide, UnitMask(dict(self.mask)), self.examples))

        def unscaled(name: str, gradient: Tensor) -> None:
            collect(name, gradient / self.loss_scale())

        return super().explore(scores, args, kwargs, wide, unscaled)


class UnitWorth:
    """What the units of a client are worth: swaps in its mask while it trains. The host of a `LossImportance` rule.

    Swaps, exploration and their pace are those of a `LearnableMask`; what was seen is kept from round to round. Between rounds
    the server replaces the weights, so what was seen before counts half, and directions of outgoing weights begin anew.

    Args:
        narrow_model: The narrow model, loaded under `first_mask`.
        targets: float (J,), in (0, 1): of the weights that the server sent.
        ratio: Share of units kept in each group.
        learning: The settings.
        memory: What `save` left behind; empty before the first round.
        flops: FLOPs of a pass under a mask.
        largest: FLOPs of the largest pass that the device can run; groups that need more are not explored.
    """

    def __init__(
        self,
        narrow_model: NarrowModel,
        targets: Tensor,
        ratio: float,
        learning: LossImportance,
        memory: Mapping[str, Any],
        *,
        flops: Callable[[UnitMask], float],
        largest: float,
    ) -> None:
        self.graph = narrow_model.graph
        self.criterion: Criterion = Learned()
        self.generator: torch.Generator | None = None
        self.training, self.joined = True, False
        self.budget: Budget | None = None
        self.execution = _Execution(narrow_model)
        self._own = _Followers()
        self.optimizers: OptimizerSet = self._own
        self.target: object = ratio
        self._followers: Sequence[HasState] = ()
        self._flops, self._largest = flops, largest
        leaves = narrow_model.named_parameters().items()
        self._trains = {narrow_model.key_of(name) for name, leaf in leaves if leaf.requires_grad}
        scores = _scores(targets, memory)
        self._first_scores = scores.clone()
        self._measured = memory["measured"].to(scores.device) if memory else torch.zeros_like(scores, dtype=torch.bool)
        self.scores = nn.Parameter(scores)
        self._rule = learning.rule(self)
        self._rule.load(self, dict(memory.get("rule", {})))
        if memory:
            self._rule.evidence.fade(0.5)
            now = torch.cat([self.execution.mask[name] for name in self.graph.groups])
            before = torch.cat([memory["mask"][name] for name in self.graph.groups])
            self._rule.evidence.forget_units((now != before).nonzero().reshape(-1))

    @property
    def swapped(self) -> int:
        """Units that this client swapped so far, over all rounds."""
        return self._rule.swapped

    @property
    def settled(self) -> bool:
        """Whether the client swaps no more."""
        return self._rule.settled

    @property
    def explored(self) -> Sequence[tuple[UnitMask, UnitMask, int]]:
        """The wide mask, the narrow mask and the number of examples of each exploring pass."""
        return self.execution.passes

    # What a training step calls.

    def outputs(self, batch: Batch, optimizers: Sequence[HasState]) -> Any:
        """Run the model on a batch; swaps that are due come first.

        Args:
            batch: Its inputs are used.
            optimizers: Whatever has state that follows the units; the first one is the optimiser.
        """
        self._followers, self._own.found = optimizers, list(optimizers[:1])
        self.execution.examples = batch.size
        self._rule.sync(self)
        return self._rule.call(self, batch.inputs, {})

    def update(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Take the gates' gradients from those of the leaves; call after the backward pass, before the weights change."""
        fused = self.execution.fused
        gates = fused.gate_gradient(gradients).to(self.scores)
        self.scores.grad = torch.zeros_like(self.scores).index_copy_(0, fused.slot_units, gates)

    def follow(self, optimizers: Sequence[HasState] = ()) -> bool:
        """End the step. The mask changes before the next one, so that no unit enters after the last."""
        self._rule.before_step(self, cast(Optimizer, optimizers[0] if optimizers else None))
        return False

    def save(self) -> dict[str, Any]:
        """Return what the client remembers until its next round."""
        scores = self.scores.detach()
        rule = {name: value.cpu() for name, value in self._rule.state().items() if not name.startswith("evidence.direction.")}
        return {
            "worth": scores.cpu().clone(),
            "measured": (self._measured | (scores != self._first_scores)).cpu(),
            "mask": {name: keep.cpu().clone() for name, keep in self.execution.mask.items()},
            "rule": rule,
        }

    # What a rule may use: see `sparsekit.training.rule.Host`.

    def counts(self) -> Mapping[str, int]:
        return self.execution.mask.counts()

    def pass_flops(self, mask: UnitMask) -> float:
        return self._flops(mask)

    def may_explore(self, group: str, wide: UnitMask) -> bool:
        readers = {piece.name for piece in self.graph.groups[group].slices if piece.gated}
        trained = {self.execution.narrow_model.key_of(name) for name in readers} <= self._trains
        return trained and self._flops(wide) <= self._largest

    def change(self, mask: UnitMask) -> None:
        self.execution.remask(mask, cast(Sequence[Optimizer], self._followers))

    def within_budget(self, worth: Tensor, limits: Mapping[str, tuple[float, float]]) -> Mapping[str, int]:
        raise InvalidValueError(
            f"a client has a ratio and no budget, so {worth.numel()} units keep their widths, not within {limits!r}"
        )

    def set_widths(self, widths: Mapping[str, int]) -> None:
        raise InvalidValueError(f"a client has a ratio and no budget, so its widths cannot become {dict(widths)}")
