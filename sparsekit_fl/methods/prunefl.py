"""PruneFL: one sparse model for all, whose mask is searched for what lowers the loss most per second of a round.

Jiang, Wang, Valls, Ko, Lee, Leung, Tassiulas: Model Pruning Enables Efficient Federated Learning on Edge Devices, IEEE
TNNLS 2022 (arXiv 1909.12326). As in the reference code: one client prunes the model first, by itself; from then on all
train it, and every few rounds they also send the squares of their summed dense gradients, from which the server
reconfigures the mask: the smallest active weights and all dropped ones compete by gradient² per second, and they are taken in
while they raise the ratio of all gradient² to all time. The number of weights that stay is an outcome.

What is ours: the initial pruning takes the first round, since a run has a fixed number of them; a client's gradients are
those of the round in which they are asked for, and not of all rounds since the last reconfiguration, which would need a dense
tensor per client between participations; the seconds per weight are those of a full device of our clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from sparsekit.errors import InvalidValueError
from sparsekit.foreach import foreach_add_
from sparsekit.graph import StateDict, UnitGraph, WeightMask
from sparsekit.measure import CostModel
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.costs import part_flops
from sparsekit_fl.client.loop import TrainingLog
from sparsekit_fl.client.messages import Request, Update, WorkCost, require_metrics
from sparsekit_fl.client.packing import Mask, mask_state, recall_mask, remember_mask
from sparsekit_fl.errors import UpdateError
from sparsekit_fl.methods.method import Method
from sparsekit_fl.options import Checked, Count, Hint, NonNegative, NonNegativeCount
from sparsekit_fl.policies import (
    Adjust,
    Leaves,
    LocalResult,
    MaskPolicy,
    Mean,
    SamplingPolicy,
    ServerContext,
    Sgd,
    load_leaves,
    sgd,
)
from sparsekit_fl.policies.aggregate import Arrivals, Over, Rule, mean
from sparsekit_fl.policies.mask import prunable_weights, search_weights
from sparsekit_fl.problem.clients import Capability
from sparsekit_fl.problem.problem import Problem

_PROCESSED = "processed_examples"
_BYTES_PER_WEIGHT = 4


@dataclass(frozen=True, kw_only=True)
class Search(Checked):
    """When and how the mask is reconfigured.

    Args:
        every: Rounds between two reconfigurations. The reference code takes 50 rounds of 5 steps; 5 rounds of some 45 steps
            are as many.
        share: Largest part of a layer's active weights that may go at once; 0.3 in the reference code.
        half_lives: How often `share` halves over the run; 1 in the reference code (10,000 of 10,000 rounds).
        overhead: Time of a round that does not depend on the mask, over the time of all prunable weights. In the reference
            code's configuration for VGG11 it is 17.4 s of its 31.1 s: 1.27.
        initial: Most reconfigurations of the initial pruning, one after as many epochs as a round has; 0 leaves it out. It
            ends before when the density has changed by at most `settled` this often in a row.
        settled: 0.1 in the reference code.
        settled_times: 5 in the reference code.
    """

    every: Count = 5
    share: Annotated[float, Field(ge=0, lt=1), Hint("it is what may be dropped at once")] = 0.3
    half_lives: NonNegative = 1.0
    overhead: NonNegative = 1.27
    initial: NonNegativeCount = 10
    settled: NonNegative = 0.1
    settled_times: Count = 5

    def due(self, round: int) -> bool:
        """Return whether clients send gradients in this round; never in the first, which is that of the initial pruning."""
        return round % self.every == 0 and not self.alone(round)

    def alone(self, round: int) -> bool:
        """Return whether the initial pruning takes this round."""
        return round == 1 and self.initial > 0

    def share_at(self, round: int, rounds: int) -> float:
        """Return the share that may be dropped after `round`."""
        return float(self.share * 0.5 ** (self.half_lives * round / rounds))


def _whole(graph: UnitGraph) -> WeightMask:
    names = prunable_weights(graph, "PruneFL")
    return WeightMask({name: torch.ones(graph.shapes[name], dtype=torch.bool) for name in names})


def weight_seconds(
    costs: CostModel, shapes: Mapping[str, torch.Size], names: Sequence[str], examples: float
) -> dict[str, float]:
    """Return the seconds that one weight of each layer costs a full device in a round: computing with it, sending it both ways.

    `examples`: passes forward and backward in a round.
    """
    device = Capability()
    link = _BYTES_PER_WEIGHT / device.uplink_bytes_per_second + _BYTES_PER_WEIGHT / device.downlink_bytes_per_second
    return {
        name: link + 3 * part_flops(costs, {name}) / shapes[name].numel() * examples / device.flops_per_second for name in names
    }


@dataclass(frozen=True)
class FirstAlone(SamplingPolicy):
    """Uniformly without replacement, but one client alone in the first round, which prunes.

    Args:
        search: Whether there is an initial pruning.
    """

    search: Search = field(default_factory=Search)

    def sample(self, ctx: ServerContext) -> list[int]:
        cohort = super().sample(ctx)
        return [cohort[int(ctx.rng.integers(len(cohort)))]] if self.search.alone(ctx.round) else cohort


@dataclass(frozen=True)
class SearchedMask(MaskPolicy):
    """One mask for all, in the server's memory.

    Args:
        search: When and how it is reconfigured.
    """

    search: Search = field(default_factory=Search)

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        prunable_weights(graph, "PruneFL")

    def propose(self, ctx: ServerContext, client_id: int, proposal: float | None) -> Mask | None:
        """Return the mask, reconfigured first where gradients came with the last round's updates."""
        memory = ctx.memory
        if "squares" in memory:
            squares, round = memory.pop("squares"), memory.pop("round")
            mask = recall_mask(memory) or _whole(ctx.graph)
            assert isinstance(mask, WeightMask)
            assert ctx.costs is not None, "the server of a run knows the costs"
            seconds = weight_seconds(ctx.costs, ctx.graph.shapes, tuple(mask), memory.pop("examples"))
            share = self.search.share_at(round, ctx.rounds)
            remember_mask(memory, search_weights(ctx.state, mask, squares, seconds, share=share, overhead=self.search.overhead))
        return recall_mask(memory)

    def validate(self, ctx: ServerContext, update: Update, assignment: Request) -> None:
        names = set(prunable_weights(ctx.graph, "PruneFL"))
        who = f"the update of client {update.client_id}"
        if self.search.alone(ctx.round) and (update.mask is None or set(update.mask) != names):
            raise UpdateError(f"{who} has no mask of the weights that are pruned")
        if self.search.due(ctx.round):
            require_metrics(update, _PROCESSED)
            if not 0.0 < update.metrics[_PROCESSED] < float("inf"):
                raise UpdateError(f"{who} says that it processed {update.metrics[_PROCESSED]} examples")
            found = {name: tuple(square.shape) for name, square in update.extra.items() if square.is_floating_point()}
            if found != {name: tuple(ctx.graph.shapes[name]) for name in names}:
                raise UpdateError(f"{who} has no gradients of the weights that are pruned, or of others too")

    def observe(self, ctx: ServerContext, updates: Sequence[Update]) -> None:
        memory = ctx.memory
        if self.search.alone(ctx.round):
            remember_mask(memory, updates[0].mask)
        if self.search.due(ctx.round):
            summed: dict[str, Tensor] = {}
            for update in updates:
                for name, square in update.extra.items():
                    summed[name] = summed[name] + square if name in summed else square.clone()
            examples = sum(update.metrics[_PROCESSED] for update in updates) / len(updates)
            memory.update(squares=summed, round=ctx.round, examples=examples)


def _summing(leaves: Leaves, sums: Mapping[str, Tensor]) -> Adjust:
    """Add the dense gradients of each step to `sums`."""
    wanted = {leaf: sums[name] for name, leaf in leaves.items() if name in sums}

    def adjust(gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        found = [leaf for leaf in gradients if leaf in wanted]
        if found:
            foreach_add_([wanted[leaf] for leaf in found], [gradients[leaf] for leaf in found])
        return gradients

    return adjust


@dataclass(frozen=True)
class SearchingSgd(Sgd):
    """SGD under the mask, which measures gradients of dropped weights too where the search is due.

    Args:
        search: When.
    """

    search: Search = field(default_factory=Search)

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        if mask is not None and not isinstance(mask, WeightMask):
            raise InvalidValueError("SearchingSgd prunes by entry; use it with SearchedMask()")
        if self.search.alone(ctx.round):
            return self._prune_alone(ctx, start)
        if not self.search.due(ctx.round):
            result = super().train(ctx, start, mask, ratio)
        else:
            log, squares = self._measure(ctx, start, mask)
            result = LocalResult.of(ctx, mask, log, extra=squares, metrics={_PROCESSED: float(log.examples)})
        return replace(result, ratio=_density(mask))

    def _measure(self, ctx: ClientContext, start: StateDict, mask: WeightMask | None) -> tuple[TrainingLog, dict[str, Tensor]]:
        """Train; the squares are those of the dense gradients, summed over the steps."""
        leaves = load_leaves(ctx, start, mask)
        sums = {name: torch.zeros_like(leaves[name]) for name in prunable_weights(ctx.graph, "PruneFL")}
        log = sgd(ctx, leaves, ctx.batches(), [_summing(leaves, sums), *self.adjusts(ctx, leaves, mask)])
        return log, {name: (total.square() * log.examples).cpu() for name, total in sums.items()}

    def _prune_alone(self, ctx: ClientContext, start: StateDict) -> LocalResult:
        search, mask = self.search, _whole(ctx.graph)
        state, log, work, unmoved = start, TrainingLog(), WorkCost(), 0
        for _ in range(search.initial):
            part, squares = self._measure(ctx, state, mask)
            log, work = log + part, work + ctx.work(mask, part)
            state = ctx.masked.narrow_state()
            seconds = weight_seconds(ctx.costs, ctx.graph.shapes, tuple(mask), part.examples)
            before, mask = mask, search_weights(state, mask, squares, seconds, share=search.share, overhead=search.overhead)
            unmoved = unmoved + 1 if abs(_density(mask) / _density(before) - 1) <= search.settled else 0
            if unmoved == search.settled_times:
                break
        return LocalResult(state=mask_state(ctx.graph, mask, state), mask=mask, log=log, work=work, ratio=_density(mask))


def _density(mask: WeightMask | None) -> float:
    if mask is None:
        return 1.0
    return sum(mask.counts().values()) / sum(keep.numel() for keep in mask.values())


@dataclass(frozen=True)
class MaskedMean(Mean):
    """The mean of the changes; what the round's mask drops becomes zero, so that a weight that comes back begins there."""

    over: Over = "all"

    def validate(self, ctx: ServerContext, update: Update, assignment: Request) -> None:
        if assignment.mask is not None and update.mask != assignment.mask:
            raise UpdateError(f"the update of client {update.client_id} has another mask than the one that it was sent")

    def combine(self, ctx: ServerContext, state: StateDict, arrivals: Arrivals, rule: Rule = mean) -> dict[str, Tensor]:
        return mask_state(ctx.graph, arrivals[-1][0].mask, super().combine(ctx, state, arrivals, rule))


def prunefl(search: Search | None = None) -> Method:
    """A searched mask for all.

    Args:
        search: When and how the mask is reconfigured; None: as in `Search`.
    """
    search = Search() if search is None else search
    return Method(
        name="prunefl",
        source="Jiang et al., PruneFL, IEEE TNNLS 2022, arXiv 1909.12326",
        sampling=FirstAlone(search),
        mask=SearchedMask(search),
        local=SearchingSgd(search=search),
        aggregate=MaskedMean(),
        note="Masks of single weights save bytes and no time; its compact FLOPs are those of the whole model.",
    )
