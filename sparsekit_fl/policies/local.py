"""Local policies: how a client learns in a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit.errors import InvalidValueError
from sparsekit.masks.mask import UnitMask, WeightMask
from sparsekit.state import StateDict
from sparsekit.units.graph import UnitGraph
from sparsekit_fl.context import ClientContext, Work
from sparsekit_fl.problem import Problem
from sparsekit_fl.sparse import Mask, mask_state
from sparsekit_fl.training import Batch, SgdStep, TrainingLog

__all__ = ["LocalPolicy", "LocalResult", "Sgd"]


@dataclass(frozen=True, eq=False, kw_only=True)
class LocalResult:
    """What a client learned.

    Args:
        state: The trained state: dense, or with `narrow` in the shapes that `mask` (a unit mask) keeps.
        mask: What was trained; only this is uploaded, unless the share policy says otherwise.
        log: Of the training.
        narrow: Whether `state` is narrow.
        extra: Further tensors to upload.
        metrics: Further numbers to upload.
        work: FLOPs, where they are not those of `log` under `mask`.
        module: A module that holds the result, ready to be scored; None where there is none.
    """

    state: StateDict
    mask: Mask | None
    log: TrainingLog
    narrow: bool = False
    extra: StateDict = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    work: Work | None = None
    module: nn.Module | None = None


class LocalPolicy:
    """How. A policy owns the step: it may take two batches, train a second model, or change its mask as it goes."""

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        """Raise, before the run starts, where the policy cannot work with this problem. The default accepts all."""

    def prepare(self, problem: Problem) -> Problem:
        """Change the problem before the run, for methods that need another architecture. The default changes nothing."""
        return problem

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        """Train on the client's data. The default is plain SGD.

        Args:
            ctx: The client's; `ctx.batches()` and `ctx.fit()` do the looping.
            start: The dense state to start from; read-only.
            mask: What to train; None for everything.
            ratio: The executed ratio.
        """
        return Sgd().train(ctx, start, mask, ratio)


Adjust = Callable[[list[Tensor], list[int]], list[Tensor]]


def _proximal(parameters: list[Tensor], strength: float) -> Adjust:
    anchors = [parameter.detach().clone() for parameter in parameters]

    def adjust(gradients: list[Tensor], places: list[int]) -> list[Tensor]:
        pull = torch._foreach_sub([parameters[place] for place in places], [anchors[place] for place in places])
        return list(torch._foreach_add(gradients, pull, alpha=strength))

    return adjust


def _masked(names: list[str], mask: WeightMask) -> Adjust:
    def adjust(gradients: list[Tensor], places: list[int]) -> list[Tensor]:
        return [
            gradient * mask[names[place]].to(gradient.device) if names[place] in mask else gradient
            for gradient, place in zip(gradients, places, strict=True)
        ]

    return adjust


@dataclass(frozen=True)
class Sgd(LocalPolicy):
    """Stochastic gradient descent on the compact model, as `TrainingConfig` says.

    Args:
        proximal: Strength of the pull to where the round started: (proximal / 2) times the squared distance is added to
            the loss; 0 is FedAvg.

    Source: McMahan et al., AISTATS 2017; the proximal term is FedProx (Li et al., MLSys 2020).
    """

    proximal: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.proximal < float("inf"):
            raise InvalidValueError(f"proximal must be >= 0, got {self.proximal!r}; 0 is plain SGD")

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        """Train the session's module; units outside a unit mask are not there, entries outside a weight mask are zero."""
        session, training = ctx.session, ctx.training
        if isinstance(mask, WeightMask):
            session.load(mask_state(ctx.graph, mask, start), None)
        else:
            session.load(start, mask)
        named = {name: leaf for name, leaf in session.named_parameters().items() if leaf.requires_grad}
        update = SgdStep(
            named.values(),
            lr=training.lr,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
            clip=training.clip,
        )
        adjusts: list[Adjust] = []
        if self.proximal:
            adjusts.append(_proximal(update.parameters, self.proximal))
        if isinstance(mask, WeightMask):
            adjusts.append(_masked(list(named), mask))

        def adjust(gradients: list[Tensor], places: list[int]) -> list[Tensor]:
            for change in adjusts:
                gradients = change(gradients, places)
            return gradients

        module, loss_of = session.module, ctx.problem.loss

        def step(batch: Batch) -> tuple[Any, Tensor]:
            outputs = module(*batch.inputs)
            loss = loss_of(outputs, batch.targets)
            update(loss, adjust=adjust if adjusts else None)
            return outputs, loss

        log = ctx.fit(module, ctx.batches(), step)
        return LocalResult(state=session.narrow_state(), mask=mask, log=log, narrow=isinstance(mask, UnitMask), module=module)
