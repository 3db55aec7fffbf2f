"""FjORD: ordered dropout. At every step a client draws a width that it can afford and trains that prefix of the model.

Horváth, Laskaridis, Almeida, Leontiadis, Venieris, Lane: FjORD: Fair and Accurate Federated Learning under
Heterogeneous Targets with Ordered Dropout, NeurIPS 2021 (arXiv 2102.13451). Batch norm statistics are separate per
width while training and taken from the client's data for scoring, where the reference code averages those of each width;
the widths share scale and shift, as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsekit.allocation.choose import select
from sparsekit.allocation.uniform import check_ratio
from sparsekit.criteria import Ordered, View
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.graph.state import StateDict
from sparsekit.training.narrow_model import NarrowModel
from sparsekit_fl.context.client import ClientContext, Work
from sparsekit_fl.costs.rowmask import rowmask_flops
from sparsekit_fl.methods.method import Method
from sparsekit_fl.options.config import TrainingConfig
from sparsekit_fl.policies.aggregate import CoverageMean
from sparsekit_fl.policies.local import Adjust, LocalPolicy, LocalResult, sgd_step
from sparsekit_fl.policies.mask import ServerCriterion, require_units
from sparsekit_fl.policies.ratio import ByCapability
from sparsekit_fl.policies.submodel import RecalibratedBatchNorm
from sparsekit_fl.problem.clients import CAPABILITY_LEVELS
from sparsekit_fl.problem.metrics import IGNORED
from sparsekit_fl.problem.problem import Loss, Problem
from sparsekit_fl.training.loop import Batch
from sparsekit_fl.training.nested import NestedModule
from sparsekit_fl.training.optimizer import SgdStep, TorchStep
from sparsekit_fl.wire.kept import Mask

__all__ = ["OrderedDropoutSgd", "fjord"]


def _soft_cross_entropy(outputs: Any, teacher: Any, targets: Tensor) -> Tensor:
    """Return the cross-entropy of `outputs` against the teacher's probabilities, classes last, where there is a target."""
    if not isinstance(outputs, Tensor) or not isinstance(teacher, Tensor):
        raise InvalidValueError(
            f"distillation needs logits as one tensor, the model gives {type(outputs).__name__}; pass distillation=False"
        )
    losses = -(teacher.softmax(-1) * outputs.log_softmax(-1)).sum(-1)
    return losses[targets != IGNORED].mean() if targets.shape == losses.shape else losses.mean()


class _Width:
    """A width below the client's own: its module, and its optimiser, both on the memory of the widest."""

    def __init__(
        self, narrow_model: NarrowModel, widest: SgdStep | TorchStep, training: TrainingConfig, mask: UnitMask
    ) -> None:
        self.nested = NestedModule(narrow_model, mask)
        self.nested.module.train()
        self._step = sgd_step(training, self.nested.leaves)
        # Of the leaves that train: their places among all, as `NestedModule` counts them.
        self._places = [place for place, leaf in enumerate(self.nested.leaves.values()) if leaf.requires_grad]
        for place, wide, narrow in zip(self._places, widest.parameters, self._step.parameters, strict=True):
            if training.momentum and isinstance(self._step, SgdStep):
                whole = widest.state.setdefault(wide, {}).setdefault("momentum_buffer", torch.zeros_like(wide))
                self._step.state[narrow] = {"momentum_buffer": self.nested.share(place, whole)}

    def train(self, batch: Batch, loss_of: Loss) -> tuple[Any, Tensor]:
        """Take one step of this width alone."""
        self.nested.pull()
        outputs = self.nested.module(*batch.inputs)
        loss = loss_of(outputs, batch.targets)
        self._step(loss)
        self.nested.push()
        return outputs, loss

    def distil(self, batch: Batch, teacher: Any) -> Adjust:
        """Return an adjust that adds the gradients of this width towards the teacher's outputs to those of the widest."""
        self.nested.pull()
        loss = _soft_cross_entropy(self.nested.module(*batch.inputs), teacher, batch.targets)
        mine = torch.autograd.grad(loss, self._step.parameters, allow_unused=True)

        def adjust(gradients: list[Tensor], places: list[int]) -> list[Tensor]:
            # Copies first, since autograd may hand out expanded or shared tensors.
            summed = [gradient.clone() for gradient in gradients]
            for whole, place in zip(summed, places, strict=True):
                part = mine[place]
                if part is not None:
                    self.nested.write(self._places[place], part, whole, add=True)
            return summed

        return adjust


@dataclass(frozen=True, kw_only=True)
class OrderedDropoutSgd(LocalPolicy):
    """SGD in which every step trains a prefix of the client's submodel, of a width drawn uniformly from those it affords.

    The widths are physically narrow modules in the memory of the widest, so a step costs what a step of a natively narrow
    network costs.

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
        """Raise NoUnitsError where the model has no units to drop."""
        require_units(graph, type(self).__name__)

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        """Train the prefix that `mask` keeps, at a width drawn for each step."""
        narrow_model, training = ctx.narrow_model, ctx.training
        widest = select(Ordered(), ctx.graph, ratio, View())
        if mask not in (None, widest):
            raise InvalidValueError("OrderedDropoutSgd trains prefixes; use it with ServerCriterion(Ordered()) or with Dense()")
        narrow_model.load(start, widest)
        widths = sorted({*(level for level in self.levels if level < ratio), ratio})
        masks = [select(Ordered(), ctx.graph, width, View()) for width in widths]
        batches = ctx.batches()
        update = sgd_step(training, narrow_model.named_parameters(), steps=batches.steps)
        narrower = [_Width(narrow_model, update, training, mask) for mask in masks[:-1]]
        steps = len(batches.bounds) * training.local_epochs
        # With one width nothing is drawn, so that the run is FedAvg's to the bit.
        drawn = iter(ctx.rng.integers(len(widths), size=steps).tolist() if narrower else [0] * steps)
        counts, examples = [0] * len(widths), [0] * len(widths)
        module, loss_of = narrow_model.module, ctx.problem.loss

        def step(batch: Batch) -> tuple[Any, Tensor]:
            place = next(drawn)
            trained = {place, len(narrower)} if self.distillation else {place}
            for width in trained:
                counts[width] += 1
                examples[width] += batch.size
            if len(narrower) not in trained:
                return narrower[place].train(batch, loss_of)
            outputs = module(*batch.inputs)
            loss = loss_of(outputs, batch.targets)
            teacher = outputs.detach() if isinstance(outputs, Tensor) else outputs
            update(loss, adjust=narrower[place].distil(batch, teacher) if len(trained) > 1 else None)
            return outputs, loss

        log = ctx.fit(module, batches, step)
        compact = sum(3 * ctx.costs.forward_flops(mask) * count for mask, count in zip(masks, examples, strict=True))
        # Each step's batch counted as full, as the paper counts; with one width to the digit.
        padded = sum(3 * rowmask_flops(ctx.costs, mask) * count for mask, count in zip(masks, counts, strict=True))
        work = Work(compact, padded * log.padded_examples // steps)
        return LocalResult.of(ctx, masks[-1], log, work=work)


def fjord(*, levels: tuple[float, ...] = CAPABILITY_LEVELS, distillation: bool = False) -> Method:
    """Ordered dropout up to the client's capability; nested entries are averaged over those that hold them, by examples.

    A client deploys the width that it can run; the global model is scored beside it.

    Args:
        levels: Widths to draw from.
        distillation: Distil the widest into the drawn width.
    """
    return Method(
        name="fjord",
        source="Horváth et al., FjORD, NeurIPS 2021, arXiv 2102.13451",
        ratio=ByCapability(),
        mask=ServerCriterion(Ordered()),
        local=OrderedDropoutSgd(levels=levels, distillation=distillation),
        aggregate=CoverageMean("examples"),
        personal=RecalibratedBatchNorm(criterion=Ordered()),
    )
