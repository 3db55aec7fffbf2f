"""Submodels: the server sends each client as many units as it can train, and averages each entry over its holders."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from sparsekit.allocation import make_mask
from sparsekit.criteria import Criterion, Ordered, ScoringContext
from sparsekit.finetuning import recalibrate_batchnorm
from sparsekit.graph import UnitGraph, UnitMask
from sparsekit.rng import torch_generator
from sparsekit_fl.methods.base import ClientContext, Method, ServerContext, StateDict, Task
from sparsekit_fl.methods.server import Over, Weights

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
    if found:
        client.deploying.append(count * client.costs.forward_flops(client.masked.unit_mask()))
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
