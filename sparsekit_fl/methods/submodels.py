"""Submodels: the server sends each client as many units as it can train, and averages each entry over its holders.

HeteroFL, FedRolex and eFD differ in the units that they choose.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sparsekit.allocation import make_mask, mask_from_scores, ratio_counts
from sparsekit.criteria import Criterion, Ordered, Random, ScoringContext
from sparsekit.finetuning import recalibrate_batchnorm
from sparsekit.graph import UnitGraph, UnitMask
from sparsekit.layers import is_convolution
from sparsekit.rng import torch_generator
from sparsekit_fl.methods.base import ClientContext, Method, Result, ServerContext, StateDict, Task, sgd
from sparsekit_fl.methods.server import Over, Weights
from sparsekit_fl.options import Positive

_LARGEST_BATCH = 256


def units(side: ServerContext | ClientContext, criterion: Criterion, ratio: float, state: StateDict | None = None) -> UnitMask:
    """Return the mask of the units that a criterion ranks first.

    Args:
        side: The context of the server, or of a client; random criteria draw from its generator "mask".
        criterion: Computes importance; it sees the weights.
        ratio: Share of the units that stays in each group, in (0, 1].
        state: The weights, dense; None: the global state, on the server.
    """
    if state is None:
        assert isinstance(side, ServerContext), "on a client, pass the state that training starts from"
        state = side.state
    context = ScoringContext(weights=state, generator=torch_generator(side.rngs["mask"]))
    return make_mask(criterion, side.graph, ratio, context)


def prefix(graph: UnitGraph, ratio: float) -> UnitMask:
    """Return the mask of the first units of each group."""
    return make_mask(Ordered(), graph, ratio, ScoringContext())


def calibrate(client: ClientContext, module: nn.Module) -> bool:
    """Replace the batch norm statistics of a module by the mean over a few large batches of the client's training data.

    Statistics averaged over submodels of several widths fit none of them. HeteroFL passes the data of all clients through the
    global model once before it is scored; here each client uses its own training data, which stay where they are, and never
    those of the test batch. The module is changed in place. Returns whether it was; not if it has no batch norm, or if the
    client has one example.

    Source: Diao, Ding, Tarokh, HeteroFL, ICLR 2021, static batch normalisation; the client's own data are our choice.
    """
    count = len(client.client.data.train)
    if count < 2:
        return False

    def inputs() -> Iterator[tuple[Any, ...]]:
        for epoch in client.batches(epochs=1, batch_size=math.ceil(count / math.ceil(count / _LARGEST_BATCH))):
            # With targets, since the last item of a batch is not an input.
            yield from ((*batch.inputs, batch.targets) for batch in epoch)

    found = bool(recalibrate_batchnorm(module, inputs()))
    module.eval()
    return found


@dataclass(frozen=True, kw_only=True)
class Submodels(Method):
    """The server chooses units by a criterion, as many as the client's capability allows, and sends the submodel alone.

    Entries are averaged over the clients that hold them.
    """

    masked = True
    recalibrates = True
    criterion: ClassVar[Criterion] = Ordered()
    """Ranks the units; by default the first units of each group come first."""
    weights: ClassVar[Weights] = "uniform"
    over: ClassVar[Over] = "holders"
    needs_units = True

    def ratio_of(self, server: ServerContext, client_id: int) -> float:
        """Return the ratio of one client in this round; by default its capability's."""
        return server.roster[client_id].capability.ratio

    def assign(self, server: ServerContext, client_id: int) -> Task:
        """Return the submodel."""
        ratio = self.ratio_of(server, client_id)
        return Task(mask=units(server, self.criterion, ratio), ratio=ratio)


@dataclass(frozen=True, kw_only=True)
class HeteroFL(Submodels):
    """A prefix of ⌈z · J⌉ units per layer; entries are averaged over the clients that hold them, all alike.

    Besides the nested submodels the paper has a scaler, static batch normalisation, a masked loss, and in its reference code,
    as in that of FedRolex, gradients clipped at norm 1. Batch norm statistics are those of each client's own data, where the
    paper takes those of all clients. The masked loss, in which classes that a client lacks count as logit 0, is left out: it is
    meant to be scored among a client's own classes, while here all methods are scored among all classes. On the digits (two
    classes per client, 60 rounds, two seeds) it lowered the accuracy from 0.76 to 0.65.

    Args:
        scaler: While training, divide the outputs of every layer that lost units by the ratio, so that the next layers get
            inputs of the size that the whole model would give them. It changes nothing before a batch norm. Without a batch
            norm it needs `clip`: at a ratio of 1/16 it multiplies by 16 in every layer. Recurrent layers have no such output
            and are left alone.
        clip: Largest norm of the gradient of a step, unless the run asks for a smaller one; None leaves it to the run.
            Units that were trained in narrow models give too large sums in a wide one, whose first gradients may be so
            large that training diverges.
    """

    source = "Diao, Ding, Tarokh, HeteroFL: Computation and Communication Efficient FL, ICLR 2021, arXiv 2010.01264"

    scaler: bool = True
    clip: Positive | None = 1.0

    def train(self, client: ClientContext, task: Task) -> Result:
        clip = min(filter(None, (self.clip, client.training.clip)), default=None)
        with scaled_outputs(client, task.ratio if self.scaler else 1.0):
            return sgd(client, task, clip=clip)


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


@dataclass(frozen=True, kw_only=True)
class FedRolex(HeteroFL):
    """HeteroFL with a window of ⌈z · J⌉ units per layer that begins at the round's number, modulo J: every unit is trained.

    Its reference code keeps HeteroFL's scaler, static batch normalisation and clipping, and all clients weigh alike. There the
    window moves towards lower indices; the direction is a matter of numbering, and ours moves upwards.
    """

    source = "Alam et al., FedRolex: Model-Heterogeneous FL with Rolling Sub-Model Extraction, NeurIPS 2022, arXiv 2212.01548"

    def assign(self, server: ServerContext, client_id: int) -> Task:
        """Send the window {round, …, round + count − 1} modulo the size of each group."""
        ratio, graph = self.ratio_of(server, client_id), server.graph
        # The nearer to the start of the window, the higher the score.
        scores = {
            name: -((torch.arange(group.size, dtype=torch.float64) - server.round) % group.size)
            for name, group in graph.groups.items()
        }
        return Task(mask=mask_from_scores(graph, scores, ratio_counts(graph, ratio), source="the window"), ratio=ratio)


@dataclass(frozen=True, kw_only=True)
class EFD(HeteroFL):
    """eFD, extended Federated Dropout: random units by capability; entries are averaged over their holders, by examples.

    A baseline of FjORD's paper, which extends Federated Dropout by Caldas et al., where all clients drop the same share. FjORD
    also bounds the number of distinct submodels ("diversity parameter"); here every client draws its own each round, which is
    the unbounded case. HeteroFL's scaler is off, and its clipping on; the papers have neither.
    """

    source = "Horváth et al., FjORD, NeurIPS 2021, arXiv 2102.13451, after Caldas et al., arXiv 1812.07210"
    criterion = Random()
    weights = "examples"

    scaler: bool = False
