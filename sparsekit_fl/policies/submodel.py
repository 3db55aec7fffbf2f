"""SubmodelSgd, RecalibratedBatchNorm: training submodels of several widths, and scoring them.

Measures of HeteroFL against what goes wrong when widths mix: activations of another size, classes that a client
has never seen, and batch norm statistics that belong to no width.
"""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit.allocation import select
from sparsekit.criteria import Criterion
from sparsekit.finetuning import recalibrate_batchnorm
from sparsekit.graph import StateDict, UnitMask
from sparsekit.layers import is_convolution
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.client.packing import Kept, Mask, mask_state, recall_mask
from sparsekit_fl.options import Positive
from sparsekit_fl.policies.local import LocalResult, Sgd
from sparsekit_fl.policies.mask import RoundView
from sparsekit_fl.policies.personal import PersonalModel, PersonalPolicy
from sparsekit_fl.problem.problem import Loss

_LARGEST_BATCH = 256


def _own_classes(loss: Loss, labels: Tensor) -> Loss:
    """A loss that sees 0 in place of the logits of classes that are not among `labels`."""
    owned = labels[labels >= 0]

    def masked(outputs: Any, targets: Tensor) -> Tensor:
        if not isinstance(outputs, Tensor) or outputs.shape[:-1] != targets.shape:
            return loss(outputs, targets)
        others = torch.ones(outputs.shape[-1], dtype=torch.bool, device=outputs.device).index_fill_(0, owned, False)
        return loss(outputs.masked_fill(others, 0.0), targets)

    return masked


@contextmanager
def scaled_outputs(ctx: ClientContext, ratio: float) -> Iterator[None]:
    """Divide what every convolution and linear layer whose outputs are units gives by `ratio`, within the block."""

    def divide(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:  # noqa: ARG001 - torch's signature
        return output / ratio

    handles = []
    for name, pieces in ctx.graph.slices_of.items() if ratio < 1.0 else ():
        owner, _, attribute = name.rpartition(".")
        layer = ctx.masked.model.get_submodule(owner)
        if not isinstance(layer, nn.Linear) and not is_convolution(layer):
            continue
        if attribute == "weight" and any(piece.side == "out" for _, piece in pieces):
            handles.append(layer.register_forward_hook(divide))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
        ctx = self._clipped(ctx)
        if self.masked_loss:
            examples = ctx.examples("train")
            labels = next(examples.batches(None, [(0, len(examples))])).targets
            if not labels.is_floating_point():
                loss = _own_classes(ctx.problem.loss, labels.unique())
                ctx = dataclasses.replace(ctx, problem=dataclasses.replace(ctx.problem, loss=loss))
        with scaled_outputs(ctx, ratio if self.scaler else 1.0):
            return super().train(ctx, start, mask, ratio)

    def _clipped(self, ctx: ClientContext) -> ClientContext:
        if self.clip is None:
            return ctx
        clip = min(self.clip, ctx.training.clip or math.inf)
        return dataclasses.replace(ctx, training=dataclasses.replace(ctx.training, clip=clip))


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
        return PersonalModel(state=Kept(ctx.graph, mask).gather_all(state), mask=mask, ratio=ratio)

    def calibrate(self, ctx: ClientContext, module: nn.Module) -> bool:
        """Replace the running statistics by the mean over a few large batches of the client's training data."""
        count = len(ctx.client.data.train)
        if count < 2:
            return False

        def inputs() -> Iterator[tuple[Any, ...]]:
            for epoch in ctx.batches(epochs=1, batch_size=math.ceil(count / math.ceil(count / _LARGEST_BATCH))):
                # With targets, since the last item of a batch is not an input.
                yield from ((*batch.inputs, batch.targets) for batch in epoch)

        found = bool(recalibrate_batchnorm(module, inputs()))
        if found:
            ctx.deploying.append(count * ctx.costs.forward_flops(ctx.masked.unit_mask()))
        module.eval()
        return found


@dataclass(frozen=True, kw_only=True)
class UnderOwnMask(RecalibratedBatchNorm):
    """The global model under the client's own mask; a client that never trained deploys the whole of it.

    Batch norm statistics are taken from the client's training data, since those of the server are averages over many masks.
    """

    def model(self, ctx: ClientContext, state: StateDict) -> PersonalModel:
        """Return the global state under the client's mask; compact where units are dropped."""
        kept = ctx.peek("mask")
        mask, ratio = recall_mask(kept), kept.get("ratio")
        if mask is None:
            return PersonalModel(state=state)
        if isinstance(mask, UnitMask):
            return PersonalModel(state=Kept(ctx.graph, mask).gather_all(state), mask=mask, ratio=ratio)
        return PersonalModel(state=mask_state(ctx.graph, mask, state), mask=mask, ratio=ratio)
