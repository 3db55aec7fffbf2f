"""Aggregate policies: how the server combines updates. Sums are in float64, in the order of the assignments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sparsekit.errors import InvalidValueError
from sparsekit.graph import StateDict
from sparsekit_fl.context.server import ServerContext
from sparsekit_fl.errors import UpdateError
from sparsekit_fl.policies.base import Policy
from sparsekit_fl.policies.rule import Accumulator
from sparsekit_fl.wire.kept import Kept
from sparsekit_fl.wire.messages import Assignment, Update

__all__ = ["AggregatePolicy", "CoverageMean", "DeltaMean", "WeightedMean", "Weighting"]

Weighting = Literal["examples", "uniform"]


class AggregatePolicy(Policy):
    """How the server combines updates.

    The default is the mean of the changes, weighted by the number of examples, where an entry that a client did not train
    counts as unchanged.
    """

    weighting: Weighting = "examples"
    by_coverage = False
    """True divides each entry by the weight of the clients that hold it, False by that of all clients."""

    mean_only: ClassVar[str] = ""
    """Why the changes cannot be combined by another rule than the mean; empty where they can."""

    def broadcast(self, ctx: ServerContext, client_id: int) -> StateDict:
        """Return further tensors to send with an assignment."""
        return {}

    def weight(self, update: Update, age: int) -> float:
        """Return the weight of an update, before dividing by their sum."""
        return float(update.examples) if self.weighting == "examples" else 1.0

    def coverage(self, ctx: ServerContext, name: str, update: Update) -> Tensor | None:
        """Return which entries of `name`, inside the update's mask, the client trained, where not all of them.

        Args:
            ctx: The context of the server.
            name: State-dict key.
            update: The update.

        Returns:
            Float, 1 or 0, of a shape that broadcasts with `update.delta[name]`; None for all.
        """
        return None

    def init(self, ctx: ServerContext, state: StateDict) -> Accumulator:
        """Return an empty accumulator for the shared state."""
        return Accumulator({name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in state.items()})

    def add(self, ctx: ServerContext, acc: Accumulator, update: Update, age: int) -> None:
        """Add one update. Only what it holds is touched."""
        self.add_weighted(ctx, acc, update, self.weight(update, age))

    def add_weighted(self, ctx: ServerContext, acc: Accumulator, update: Update, weight: float) -> None:
        """Add one update with a given weight. All updates of a round come through here, or a rule cannot be applied."""
        rule = acc.rule
        weight = weight if rule is None else rule.weight(weight)
        acc.unit = acc.unit or weight
        weight = weight / acc.unit if acc.unit else 0.0
        kept = Kept(ctx.graph, update.mask)
        for name, delta in update.delta.items():
            covered = self.coverage(ctx, name, update)
            if acc.optimizer is not None:
                acc.optimizer.hold(name, kept, covered, acc.sums[name].shape)
            if rule is None:
                # The product of a 24-bit mantissa and a small number is exact in float64; only the sum rounds.
                change = delta.to(torch.float64, copy=True).mul_(weight)
                kept.add(name, change if covered is None else change * covered, acc.sums[name])
            else:
                rule.add(acc, name, kept, update, covered, weight)
            if self.by_coverage and (rule is None or rule.counts_holders):
                if kept.is_whole(name) and covered is None:
                    acc.covered[name] = acc.covered.get(name, 0.0) + weight
                else:
                    if name not in acc.weights:
                        acc.weights[name] = torch.zeros_like(acc.sums[name])
                    share = weight if covered is None else (weight * covered).expand(delta.shape)
                    kept.add(name, share, acc.weights[name])
        acc.weight += weight
        acc.count += 1

    def finish(self, ctx: ServerContext, state: StateDict, acc: Accumulator) -> dict[str, Tensor]:
        """Return the new shared state; `state` is read only. Integer entries are rounded to the nearest, halves to even."""
        result: dict[str, Tensor] = {}
        for name, tensor in state.items():
            change = self.change(name, acc)
            if change is None:
                result[name] = tensor.clone()
                continue
            value = tensor.to(torch.float64) + change
            result[name] = (value if tensor.is_floating_point() else value.round()).to(tensor.dtype)
        return result

    def change(self, name: str, acc: Accumulator) -> Tensor | None:
        """Return the change of an entry of the state; None: it stays."""
        acc.asked.add(name)
        if acc.rule is None:
            change = self._mean(name, acc)
        else:
            change = acc.rule.change(acc, name, lambda: self._mean(name, acc), by_coverage=self.by_coverage)
        return change if acc.optimizer is None else acc.optimizer.move(name, change)

    def _mean(self, name: str, acc: Accumulator) -> Tensor | None:
        if acc.weight == 0:
            return None
        if not self.by_coverage:
            return acc.sums[name] / acc.weight
        whole = acc.covered.get(name, 0.0)
        if name not in acc.weights:
            return acc.sums[name] / whole if whole else None
        held = acc.weights[name] + whole
        return torch.where(held > 0, acc.sums[name] / held.clamp(min=torch.finfo(torch.float64).tiny), 0.0)


@dataclass(frozen=True)
class WeightedMean(AggregatePolicy):
    """Mean of the clients' models, for methods whose clients upload whole entries.

    Args:
        weighting: By the number of examples, or equal.

    Source: McMahan et al., AISTATS 2017.
    """

    weighting: Weighting = "examples"

    def validate(self, ctx: ServerContext, update: Update, assignment: Assignment) -> None:
        """Raise UpdateError where the update holds only a part of some entry."""
        if update.mask is not None:
            raise UpdateError(self._masked(update))

    def add(self, ctx: ServerContext, acc: Accumulator, update: Update, age: int) -> None:
        """Add one update.

        Raises:
            InvalidValueError: the update holds only a part of some entry.
        """
        if update.mask is not None:
            raise InvalidValueError(self._masked(update))
        super().add(ctx, acc, update, age)

    def _masked(self, update: Update) -> str:
        return (
            f"{type(self).__name__} needs whole entries, but client {update.client_id} sent masked ones;"
            " choose DeltaMean (untrained entries stay) or CoverageMean (mean over the clients that hold an entry)"
        )


@dataclass(frozen=True)
class DeltaMean(AggregatePolicy):
    """An entry moves by the sum of weighted changes over the weight of *all* clients; entries that nobody trained stay.

    Args:
        weighting: By the number of examples, or equal.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), equation 13; FedMP's R2SP (Jiang et al., ICDE 2022).
    """

    weighting: Weighting = "examples"


@dataclass(frozen=True)
class CoverageMean(AggregatePolicy):
    """An entry becomes the mean over the clients that hold it; entries that nobody holds stay.

    Args:
        weighting: "uniform" is HeteroFL and FedRolex, "examples" is FjORD.

    Source: Diao, Ding, Tarokh, HeteroFL, ICLR 2021.
    """

    weighting: Weighting = "uniform"
    by_coverage = True
