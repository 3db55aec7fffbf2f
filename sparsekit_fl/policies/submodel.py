"""SubmodelSgd, OwnedRowsMean, RecalibratedBatchNorm: training submodels of several widths, averaging and scoring them.

Three measures of HeteroFL against what goes wrong when widths mix: activations of another size, classes that a client
has never seen, and batch norm statistics that belong to no width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit._torch import ConvNd
from sparsekit.allocation.choose import select
from sparsekit.criteria.base import Criterion
from sparsekit.deprecations import renamed_keywords
from sparsekit.graph.index import along
from sparsekit.graph.state import StateDict
from sparsekit_fl.context.client import ClientContext
from sparsekit_fl.context.server import ServerContext
from sparsekit_fl.lanes.lane import Lane
from sparsekit_fl.options.checked import Positive
from sparsekit_fl.policies.aggregate import CoverageMean
from sparsekit_fl.policies.local import LocalResult, Sgd
from sparsekit_fl.policies.mask import RoundView
from sparsekit_fl.policies.personal import PersonalModel, PersonalPolicy
from sparsekit_fl.problem.problem import Loss
from sparsekit_fl.wire.kept import Kept, Mask
from sparsekit_fl.wire.messages import Update

__all__ = ["OwnedRowsMean", "RecalibratedBatchNorm", "SubmodelSgd"]

_OWNED = "owned_classes"
_LARGEST_BATCH = 256


class _OwnedClassesLoss:
    """A loss that sees 0 in place of the logits of classes that the client does not own."""

    def __init__(self, loss: Loss, labels: Tensor) -> None:
        self._loss = loss
        self._labels = labels
        self.owned: Tensor | None = None
        """bool (classes,), once a batch has shown the number of classes; None where targets are no classes."""

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        if not isinstance(outputs, Tensor) or targets.is_floating_point() or outputs.shape[:-1] != targets.shape:
            return self._loss(outputs, targets)
        if self.owned is None:
            self.owned = torch.zeros(outputs.shape[-1], dtype=torch.bool, device=outputs.device)
            self.owned[self._labels[self._labels >= 0]] = True
            self._hidden = ~self.owned
        return self._loss(outputs.masked_fill(self._hidden, 0.0), targets)


@contextmanager
def _scaled(ctx: ClientContext, ratio: float) -> Iterator[None]:
    """Divide what every convolution and linear layer whose outputs are units gives by `ratio`, within the block."""

    def divide(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:  # noqa: ARG001 - torch's signature
        return output / ratio

    handles = []
    if ratio < 1.0:
        module = ctx.narrow_model.module
        handles = [module.get_submodule(name).register_forward_hook(divide) for name in _scaled_layers(ctx)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _scaled_layers(ctx: ClientContext) -> list[str]:
    """Return the names of the convolutions and linear layers whose outputs are units."""
    found = []
    for name, pieces in ctx.graph.slices_of.items():
        owner, _, attribute = name.rpartition(".")
        layer = isinstance(ctx.narrow_model.module.get_submodule(owner), (nn.Linear, ConvNd)) and attribute == "weight"
        if layer and any(piece.side == "out" for _, piece in pieces):
            found.append(owner)
    return found


@dataclass(frozen=True, kw_only=True)
class SubmodelSgd(Sgd):
    """SGD on a submodel, with the measures of HeteroFL that concern training. Without them it is `Sgd`.

    Args:
        clip: Largest norm of the gradient of a step, where the run does not ask for a smaller one; None leaves it to the
            run. Units that were trained in narrow models give too large sums in a wide one, whose first gradients may be
            so large that training diverges. 1 in the reference codes of HeteroFL and FedRolex.
        scaler: Divide the outputs of every layer that lost units by the ratio, while training, so that the next layers get
            inputs of the size that the whole model would give them. It changes nothing before a batch norm. Without one it
            needs `clip`: at a ratio of 1/16 it multiplies by 16 in every layer. Recurrent layers have no such output and are
            left alone.
        masked_loss: Classes of which the client has no example count as logit 0 in the loss, so that it does not unlearn
            them. Meant for clients that are also scored among their own classes only. Where targets are no classes there is
            nothing to hide.

    Source: Diao, Ding, Tarokh, HeteroFL, ICLR 2021; all are on in its reference code, and in that of FedRolex.
    """

    clip: Positive | None = 1.0
    scaler: bool = True
    masked_loss: bool = False

    def train(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> LocalResult:
        """Train; with `masked_loss` the update carries which classes the client owns."""
        ctx = self._clipped(ctx)
        loss: _OwnedClassesLoss | None = None
        if self.masked_loss:
            examples = ctx.examples("train")
            whole = next(examples.batches(None, [(0, len(examples))]))
            if not whole.targets.is_floating_point():
                loss = _OwnedClassesLoss(ctx.problem.loss, whole.targets.unique())
                ctx = dataclasses.replace(ctx, problem=dataclasses.replace(ctx.problem, loss=loss))
        with _scaled(ctx, ratio if self.scaler else 1.0):
            result = super().train(ctx, start, mask, ratio)
        if loss is None or loss.owned is None or bool(loss.owned.all()):
            return result
        return dataclasses.replace(result, extra={**result.extra, _OWNED: loss.owned.cpu()})

    def lane(self, ctx: ClientContext, start: StateDict, mask: Mask | None, ratio: float) -> Lane[LocalResult]:
        """Describe the same training for several clients at once."""
        lane = super().lane(self._clipped(ctx), start, mask, ratio)
        if not self.scaler:
            return lane
        return dataclasses.replace(lane, divided=tuple(_scaled_layers(ctx)), divisor=ratio)

    def why_alone(self, *, batched: bool) -> str | None:
        """Say so where each client has a loss of its own."""
        return "each of its clients has a loss of its own" if self.masked_loss else super().why_alone(batched=batched)

    def _clipped(self, ctx: ClientContext) -> ClientContext:
        if self.clip is None:
            return ctx
        clip = min(self.clip, ctx.training.clip or math.inf)
        return dataclasses.replace(ctx, training=dataclasses.replace(ctx.training, clip=clip))


@dataclass(frozen=True)
class OwnedRowsMean(CoverageMean):
    """`CoverageMean` in which a client's rows of the output layer count only for the classes that it owns.

    The output layer is told by its shape: entries whose first axis has one position per class and no units.

    Source: Diao, Ding, Tarokh, HeteroFL, ICLR 2021, reference code.
    """

    def coverage(self, ctx: ServerContext, name: str, update: Update) -> Tensor | None:
        """Return 1 on the rows of owned classes; None for entries that are no output layer."""
        owned = update.extra.get(_OWNED)
        shape = update.delta[name].shape
        if owned is None or owned.dtype != torch.bool or not shape or shape[0] != owned.numel():
            return None
        if any(piece.dim == 0 for _, piece in ctx.graph.slices_of.get(name, ())):
            return None
        return along(owned.to(torch.float64), 0, len(shape))


@renamed_keywords(pattern="criterion")
@dataclass(frozen=True, kw_only=True)
class RecalibratedBatchNorm(PersonalPolicy):
    """The global model, its batch norm statistics taken anew from the client's training data.

    Statistics averaged over submodels of several widths are those of no model. HeteroFL passes the data of all clients
    through the global model once before it is scored; here each client uses its own training data, which stay where they
    are, and never those of the test batch. Both scores, of what is deployed and of the global model, are taken so. A model
    without batch norm is the global model as it stands.

    Args:
        criterion: Deploy the units that it ranks first, at the client's capability; None deploys the whole model.

    Source: Diao, Ding, Tarokh, HeteroFL, ICLR 2021, static batch normalisation; the client's own data are our choice.
    """

    criterion: Criterion | None = None

    def model(self, ctx: ClientContext, state: StateDict) -> PersonalModel:
        """Return the whole global model, or what the client can run of it."""
        ratio = ctx.capability.ratio
        if self.criterion is None or ratio == 1.0:
            return PersonalModel(state=state)
        mask = select(self.criterion, ctx.graph, ratio, RoundView(round=ctx.round, weights=state))
        return PersonalModel(state=Kept(ctx.graph, mask).gather_all(state), mask=mask, narrow=True, ratio=ratio)

    def calibrate(self, ctx: ClientContext, module: nn.Module) -> None:
        """Replace the running statistics by the mean over a few large batches of the client's training data."""
        norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
        count = len(ctx.client.data.train)
        if not norms or count < 2:
            return
        batches = ctx.batches(epochs=1, batch_size=math.ceil(count / math.ceil(count / _LARGEST_BATCH)))
        momenta = [norm.momentum for norm in norms]
        module.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
            norm.train()
        with torch.no_grad():
            for epoch in batches:
                for batch in epoch:
                    module(*batch.inputs)
        ctx.deploying.append(count * ctx.costs.forward_flops(ctx.narrow_model.mask))
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        module.eval()
