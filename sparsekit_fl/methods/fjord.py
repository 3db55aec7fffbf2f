"""FjORD: ordered dropout. At every step a client draws a width that it can afford and trains that prefix of the model.

Horváth, Laskaridis, Almeida, Leontiadis, Venieris, Lane: FjORD: Fair and Accurate Federated Learning under
Heterogeneous Targets with Ordered Dropout, NeurIPS 2021 (arXiv 2102.13451). Batch norm statistics are separate per
width while training and taken from the client's data for scoring, where the reference code averages those of each width;
the widths share scale and shift, as there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from sparsekit.allocation import check_ratio, select
from sparsekit.criteria import Ordered, View
from sparsekit.errors import InvalidValueError
from sparsekit.graph import Axes, StateDict, UnitGraph, UnitMask
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.costs import rowmask_flops
from sparsekit_fl.client.loop import Batch
from sparsekit_fl.client.messages import WorkCost
from sparsekit_fl.client.optimizer import make_step
from sparsekit_fl.methods.method import Method
from sparsekit_fl.policies import ByCapability, LocalPolicy, LocalResult, Mask, Mean, RecalibratedBatchNorm, ServerCriterion
from sparsekit_fl.policies.local import Leaves, load_leaves
from sparsekit_fl.policies.mask import require_units
from sparsekit_fl.problem.clients import CAPABILITY_LEVELS
from sparsekit_fl.problem.metrics import IGNORED
from sparsekit_fl.problem.problem import Problem


def _soft_cross_entropy(outputs: Any, teacher: Any, targets: Tensor) -> Tensor:
    """Return the cross-entropy of `outputs` against the teacher's probabilities, classes last, where there is a target."""
    if not isinstance(outputs, Tensor) or not isinstance(teacher, Tensor):
        raise InvalidValueError(
            f"distillation needs logits as one tensor, the model gives {type(outputs).__name__}; pass distillation=False"
        )
    losses = -(teacher.softmax(-1) * outputs.log_softmax(-1)).sum(-1)
    return losses[targets != IGNORED].mean() if targets.shape == losses.shape else losses.mean()


class _Width:
    """A width below the client's own: its module, run on parts of the leaves of the widest, of which `mask` keeps a part.

    The client's narrow model is loaded with this width and copied.
    """

    def __init__(self, ctx: ClientContext, start: StateDict, widest: UnitMask, mask: UnitMask) -> None:
        ctx.load(start, mask)
        self._module = ctx.masked.compact().train()
        outer, inner = ctx.graph.kept_indices(widest), ctx.graph.kept_indices(mask)
        self._axes = {name: _places(outer[name], axes) for name, axes in inner.items()}

    def outputs(self, leaves: Leaves, batch: Batch) -> Any:
        """Run this width; what it reads of the leaves gets their gradient, all else zeros."""
        parts = {name: _part(leaf, self._axes[name]) if name in self._axes else leaf for name, leaf in leaves.items()}
        return functional_call(self._module, parts, batch.inputs)


def _places(outer: Axes, inner: Axes) -> list[tuple[int, Tensor, bool]]:
    """Axis, where its kept dense positions lie among those that a wider mask keeps, and whether they come first there."""
    found = []
    for dim, kept in inner.items():
        places = torch.searchsorted(outer[dim], kept)
        found.append((dim, places, bool((places == torch.arange(places.numel())).all())))
    return found


def _part(leaf: Tensor, axes: Sequence[tuple[int, Tensor, bool]]) -> Tensor:
    """The positions of a leaf along some axes: a view where they come first, as the units of a prefix do."""
    for dim, places, first in axes:
        leaf = leaf.narrow(dim, 0, places.numel()) if first else leaf.index_select(dim, places.to(leaf.device))
    return leaf


@dataclass(frozen=True, kw_only=True)
class OrderedDropoutSgd(LocalPolicy):
    """SGD in which every step trains a prefix of the client's submodel, of a width drawn uniformly from those it affords.

    The widths are physically narrow modules that read the leaves of the widest. One optimiser steps those: its momentum and
    weight decay also move what the drawn width does not hold, as in the reference code.

    Args:
        levels: Widths to draw from; those below the client's own ratio, which is always one of them, are used. The
            paper's are 0.2, 0.4, …, 1; ours are the capability levels, so that the widths of all clients coincide.
        distillation: Train the widest at every step, and the drawn width towards its outputs (section on knowledge
            distillation); off in the reference code unless asked for.

    Source: Horváth et al., NeurIPS 2021, algorithm 1.
    """

    levels: tuple[float, ...] = CAPABILITY_LEVELS
    distillation: bool = False

    def __post_init__(self) -> None:
        for level in self.levels:
            check_ratio(level)

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        require_units(graph, type(self).__name__)

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        widest = select(Ordered(), ctx.graph, ratio, View())
        if mask not in (None, widest):
            raise InvalidValueError("OrderedDropoutSgd trains prefixes; use it with ServerCriterion(Ordered()) or with Dense()")
        widths = sorted({*(level for level in self.levels if level < ratio), ratio})
        masks = [select(Ordered(), ctx.graph, width, View()) for width in widths]
        narrower = [_Width(ctx, start, widest, mask) for mask in masks[:-1]]
        leaves = load_leaves(ctx, start, widest)
        batches = ctx.batches()
        update = make_step(ctx.training, leaves.values(), steps=batches.steps)
        # With one width nothing is drawn, so that the run is FedAvg's to the bit.
        steps = batches.steps
        drawn = iter(ctx.rng.integers(len(widths), size=steps).tolist() if narrower else [0] * steps)
        counts, examples = [0] * len(widths), [0] * len(widths)
        module, loss_of = ctx.masked.model, ctx.problem.loss

        def step(batch: Batch) -> tuple[Any, Tensor]:
            place = next(drawn)
            trained = {place, len(narrower)} if self.distillation else {place}
            for width in trained:
                counts[width] += 1
                examples[width] += batch.size
            outputs = module(*batch.inputs) if len(narrower) in trained else narrower[place].outputs(leaves, batch)
            loss = total = loss_of(outputs, batch.targets)
            if len(trained) > 1:
                teacher = outputs.detach() if isinstance(outputs, Tensor) else outputs
                total = loss + _soft_cross_entropy(narrower[place].outputs(leaves, batch), teacher, batch.targets)
            update(total)
            return outputs, loss

        log = ctx.fit(module, batches, step)
        compact = sum(3 * ctx.costs.forward_flops(mask) * count for mask, count in zip(masks, examples, strict=True))
        # Each step's batch counted as full, as the paper counts; with one width to the digit.
        padded = sum(3 * rowmask_flops(ctx.costs, mask) * count for mask, count in zip(masks, counts, strict=True))
        work = WorkCost(flops=compact, flops_paper=padded * log.padded_examples // steps)
        return LocalResult.of(ctx, masks[-1], log, work=work)


def fjord() -> Method:
    """Ordered dropout up to the client's capability; nested entries are averaged over those that hold them, by examples.

    A client deploys the width that it can run; the global model is scored beside it.
    """
    return Method(
        name="fjord",
        source="Horváth et al., FjORD, NeurIPS 2021, arXiv 2102.13451",
        ratio=ByCapability(),
        mask=ServerCriterion(Ordered()),
        local=OrderedDropoutSgd(),
        aggregate=Mean("examples", over="holders"),
        personal=RecalibratedBatchNorm(criterion=Ordered()),
    )
