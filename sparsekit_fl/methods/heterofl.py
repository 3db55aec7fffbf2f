"""HeteroFL: a client trains the first units of every layer, as many as its device allows.

Diao, Ding, Tarokh: HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients, ICLR
2021 (arXiv 2010.01264). Besides the nested submodels it has a scaler, static batch normalisation, a masked loss, and in
its reference code gradients clipped at norm 1. All are here. Batch norm statistics are those of each client's own data,
where the paper takes those of all clients. The masked loss alone is off by default: it is meant to be scored among a
client's own classes, while here all methods are scored among all classes. On the digits (two classes per client, 60
rounds, two seeds) it lowers the accuracy from 0.76 to 0.65.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit.layers import is_convolution
from sparsekit_fl.methods.base import ClientContext, Result, ServerContext, StateDict, Task, Update, mean, sgd
from sparsekit_fl.methods.submodels import Submodels
from sparsekit_fl.options import Positive
from sparsekit_fl.problem.problem import Loss


@dataclass(frozen=True, kw_only=True)
class HeteroFL(Submodels):
    """A prefix of ⌈z · J⌉ units per layer; entries are averaged over the clients that hold them, all alike.

    Args:
        scaler: While training, divide the outputs of every layer that lost units by the ratio, so that the next layers get
            inputs of the size that the whole model would give them. It changes nothing before a batch norm. Without a batch
            norm it needs `clip`: at a ratio of 1/16 it multiplies by 16 in every layer. Recurrent layers have no such output
            and are left alone.
        clip: Largest norm of the gradient of a step, unless the run asks for a smaller one; None leaves it to the run.
            Units that were trained in narrow models give too large sums in a wide one, whose first gradients may be so
            large that training diverges. 1 in the reference codes of HeteroFL and FedRolex.
        masked_loss: Classes of which the client has no example count as logit 0 in the loss, so that it does not unlearn
            them, and their rows of the output layer do not count in the mean. If targets are not classes, it changes nothing.

    Source: Diao, Ding, Tarokh, HeteroFL, ICLR 2021; all are on in its reference code, and in that of FedRolex.
    """

    source = "Diao, Ding, Tarokh, HeteroFL, ICLR 2021, arXiv 2010.01264"

    scaler: bool = True
    clip: Positive | None = 1.0
    masked_loss: bool = False

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train the submodel, with scaler, clipping and masked loss."""
        loss = None
        if self.masked_loss:
            examples = client.examples("train")
            labels = next(examples.batches(None, [(0, len(examples))])).targets
            if not labels.is_floating_point():
                loss = _own_classes(client.problem.loss, labels.unique())
        clip = min(filter(None, (self.clip, client.training.clip)), default=None)
        with scaled_outputs(client, task.ratio if self.scaler else 1.0):
            return sgd(client, task, loss=loss, clip=clip)

    def aggregate(self, server: ServerContext, updates: Sequence[Update]) -> StateDict:
        """Return the mean over the holders; with a masked loss, without the rows of classes that a client does not have."""
        return mean(server, updates, weights=self.weights, over="changed" if self.masked_loss else self.over)


def _own_classes(loss: Loss, labels: Tensor) -> Loss:
    """Return a loss that sees 0 in place of the logits of classes that are not among `labels`."""
    owned = labels[labels >= 0]

    def masked(outputs: Any, targets: Tensor) -> Tensor:
        if not isinstance(outputs, Tensor) or outputs.shape[:-1] != targets.shape:
            return loss(outputs, targets)
        others = torch.ones(outputs.shape[-1], dtype=torch.bool, device=outputs.device).index_fill_(0, owned, False)
        return loss(outputs.masked_fill(others, 0.0), targets)

    return masked


@contextmanager
def scaled_outputs(client: ClientContext, ratio: float) -> Iterator[None]:
    """Within the block, divide the outputs of every convolution and linear layer whose outputs are units by `ratio`."""

    def divide(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:  # noqa: ARG001 - torch's signature
        return output / ratio

    handles = []
    for name, pieces in client.graph.slices_of.items() if ratio < 1.0 else ():
        owner, _, attribute = name.rpartition(".")
        layer = client.masked.model.get_submodule(owner)
        if not isinstance(layer, nn.Linear) and not is_convolution(layer):
            continue
        if attribute == "weight" and any(piece.side == "out" for _, piece in pieces):
            handles.append(layer.register_forward_hook(divide))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
