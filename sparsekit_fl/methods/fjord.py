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

from sparsekit.errors import InvalidValueError
from sparsekit.graph import Axes, UnitMask
from sparsekit_fl.client.context import rowmask_flops
from sparsekit_fl.client.fit import Batch, make_step
from sparsekit_fl.client.messages import WorkCost
from sparsekit_fl.client.packing import Kept
from sparsekit_fl.methods.base import ClientContext, Model, Result, StateDict, Task
from sparsekit_fl.methods.client import Leaves, load_leaves
from sparsekit_fl.methods.submodels import Submodels, prefix
from sparsekit_fl.problem.metrics import IGNORED


def _soft_cross_entropy(outputs: Any, teacher: Any, targets: Tensor) -> Tensor:
    """Return the cross-entropy of `outputs` against the teacher's probabilities, classes last, where there is a target."""
    if not isinstance(outputs, Tensor) or not isinstance(teacher, Tensor):
        raise InvalidValueError(
            f"distillation needs logits as one tensor, the model gives {type(outputs).__name__}; pass distillation=False"
        )
    losses = -(teacher.softmax(-1) * outputs.log_softmax(-1)).sum(-1)
    return losses[targets != IGNORED].mean() if targets.shape == losses.shape else losses.mean()


class _Width:
    """A narrower submodel that slices the parameters of the widest one.

    The client's narrow model is loaded with this width and copied.
    """

    def __init__(self, client: ClientContext, start: StateDict, widest: UnitMask, mask: UnitMask) -> None:
        client.load(start, mask)
        self._module = client.masked.compact().train()
        outer, inner = client.graph.kept_indices(widest), client.graph.kept_indices(mask)
        self._axes = {name: _places(outer[name], axes) for name, axes in inner.items()}

    def outputs(self, leaves: Leaves, batch: Batch) -> Any:
        """Run this width; the sliced parts of the leaves get gradients, everything else zeros."""
        parts = {name: _part(leaf, self._axes[name]) if name in self._axes else leaf for name, leaf in leaves.items()}
        return functional_call(self._module, parts, batch.inputs)


def _places(outer: Axes, inner: Axes) -> list[tuple[int, Tensor, bool]]:
    """Return (axis, positions of the inner indices among the outer ones, whether these come first)."""
    found = []
    for dim, kept in inner.items():
        places = torch.searchsorted(outer[dim], kept)
        found.append((dim, places, bool((places == torch.arange(places.numel())).all())))
    return found


def _part(leaf: Tensor, axes: Sequence[tuple[int, Tensor, bool]]) -> Tensor:
    """Return the positions of a leaf along some axes: a view if they come first, as the units of a prefix do."""
    for dim, places, first in axes:
        leaf = leaf.narrow(dim, 0, places.numel()) if first else leaf.index_select(dim, places.to(leaf.device))
    return leaf


@dataclass(frozen=True, kw_only=True)
class FjORD(Submodels):
    """Ordered dropout up to the client's capability; nested entries are averaged over the clients that hold them, by examples.

    Every step trains a prefix of the client's submodel, of a width drawn uniformly from those it affords: the levels from which
    the run draws capabilities, so that the widths of all clients coincide (0.2, 0.4, …, 1 in the paper). The widths are
    physically narrow modules that share the leaves of the widest. One optimiser steps those: its momentum and weight decay also
    move what the drawn width does not hold, as in the reference code. A client deploys the width that it can run; the global
    model is scored too.

    Args:
        distillation: Train the widest at every step, and the drawn width towards its outputs (section on knowledge
            distillation); off in the reference code unless asked for.

    Source: Horváth et al., NeurIPS 2021, algorithm 1.
    """

    source = "Horváth et al., FjORD, NeurIPS 2021, arXiv 2102.13451"
    weights = "examples"

    distillation: bool = False

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train; the work of a step is that of the widths that it ran."""
        ratio = task.ratio
        widths = [*(level for level in sorted(set(client.levels)) if level < ratio), ratio]
        masks = [prefix(client.graph, width) for width in widths]
        narrower = [_Width(client, task.state, masks[-1], mask) for mask in masks[:-1]]
        leaves = load_leaves(client, task.state, masks[-1])
        batches = client.batches()
        update = make_step(client.training, leaves.values())
        # With one width nothing is drawn, so that the run is FedAvg's to the bit.
        steps = batches.steps
        drawn = iter(client.rng.integers(len(widths), size=steps).tolist() if narrower else [0] * steps)
        counts, examples = [0] * len(widths), [0] * len(widths)
        module, loss_of = client.masked.model, client.problem.loss

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

        log = client.fit(module, batches, step)
        costs = client.costs
        compact = sum(3 * costs.forward_flops(mask) * count for mask, count in zip(masks, examples, strict=True))
        # Each step's batch counted as full, as the paper counts; with one width to the digit.
        padded = sum(3 * rowmask_flops(costs, mask) * count for mask, count in zip(masks, counts, strict=True))
        work = WorkCost(flops=compact, flops_paper=padded * log.padded_examples // steps)
        return Result.of(client, masks[-1], log, work=work)

    def deploy(self, client: ClientContext, state: StateDict) -> Model:
        """Return as much of the global model as the client can run."""
        ratio = client.capability.ratio
        if ratio == 1.0:
            return Model(state=state)
        mask = prefix(client.graph, ratio)
        return Model(state=Kept(client.graph, mask).gather_all(state), mask=mask, ratio=ratio)
