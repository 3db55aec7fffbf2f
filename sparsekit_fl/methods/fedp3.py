"""FedP3: each client owns a few layers, receives the others pruned, trains a submodel, and sends its own layers back.

Yi, Gazagnadou, Richtárik, Lyu: FedP3: Federated Personalized and Privacy-friendly Network Pruning under Model Heterogeneity,
ICLR 2024 (arXiv 2404.09816). The layers are assigned as by "OPU2" in the reference code: two that follow each other, cyclically
(by group of clients there, by client here, since its groups are those of a five-layer network); the others come pruned by
magnitude to 0.9 of their weights, and the head stays with the client. The reference code has no local pruning; of the
paper's strategies we take ordered dropout at the client's capability. As in the reference code the weights that come as
zero train like the others.
"""

from dataclasses import dataclass

import torch

from sparsekit.allocation import select
from sparsekit.criteria import Ordered, View
from sparsekit.graph import Layer, StateDict, UnitGraph, UnitMask, WeightMask, head_entries, layer_weights, to_weights
from sparsekit_fl.client.context import ClientContext
from sparsekit_fl.methods.method import Method
from sparsekit_fl.options import Count, Ratio
from sparsekit_fl.policies import ByCapability, LocalModel, LocalResult, Mask, MaskPolicy, Mean, PrivateHead, ServerContext
from sparsekit_fl.policies.mask import largest_weights, require_units
from sparsekit_fl.problem.problem import Problem


def own_layers(graph: UnitGraph, client_id: int, count: int | None, *, private_head: bool) -> tuple[Layer, ...]:
    """Return the `count` layers that a client owns, cyclically: client k begins at layer k modulo their number; None: all.

    A private head is left out, which nobody sends.
    """
    layers = graph.layers[:-1] if private_head else graph.layers
    if count is None or count >= len(layers):
        return tuple(layers)
    return tuple(layers[(client_id + step) % len(layers)] for step in range(count))


@dataclass(frozen=True)
class PrunedOthers(MaskPolicy):
    """The client's own layers come down whole, the others with their largest weights; the client trains a prefix of the units.

    Args:
        layers: Number of layers that a client owns; None for all.
        kept: Share of the weights of each other layer that comes down.
        private_head: The head stays with the client.
    """

    layers: Count | None = 2
    kept: Ratio = 0.9
    private_head: bool = True

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        require_units(graph, "FedP3")

    def propose(self, ctx: ServerContext, client_id: int, proposal: float | None) -> Mask | None:
        own = own_layers(ctx.graph, client_id, self.layers, private_head=self.private_head)
        mine = {name for layer in own for name in layer.entries}
        names = [n for n in layer_weights(ctx.graph.layers, ctx.graph.shapes) if n not in mine]
        return largest_weights(ctx.state, names, self.kept) if names and self.kept < 1.0 else None

    def choose(self, ctx: ClientContext, ratio: float, state: StateDict) -> Mask | None:
        """Return the first units of every group, as many as the client can train."""
        return select(Ordered(), ctx.graph, ratio, View())


@dataclass(frozen=True)
class OwnLayers(PrivateHead):
    """The trained part of the client's own layers goes up, and nothing else.

    Args:
        count: Number of layers that a client owns; None for all.
        private_head: The head stays with the client; False treats it as any other layer.
    """

    count: Count | None = 2
    private_head: bool = True

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        if self.private_head:
            super().check(problem, graph)

    def is_shared(self, name: str, graph: UnitGraph) -> bool:
        return not self.private_head or name not in head_entries(graph.layers, self.layers)

    def upload_mask(self, ctx: ClientContext, result: LocalResult) -> Mask | None:
        """Return a mask by entry: the units that were trained, in the client's own layers."""
        own = own_layers(ctx.graph, ctx.client.id, self.count, private_head=self.private_head)
        mine = {name for layer in own for name in layer.entries}
        shared = [name for name in ctx.graph.shapes if self.is_shared(name, ctx.graph)]
        trained = to_weights(ctx.graph, result.mask) if isinstance(result.mask, UnitMask) else {}
        nothing = {n: torch.zeros(ctx.graph.shapes[n], dtype=torch.bool) for n in shared if n not in mine}
        return WeightMask({**{name: trained[name] for name in shared if name in mine and name in trained}, **nothing})


def fedp3(*, layers: int | None = 2, private_head: bool = True) -> Method:
    """Layer-wise sharing with pruning on both sides; each entry is averaged over the clients that send it.

    Args:
        layers: Number of layers that a client owns; 1, 2 and 3 are "LowerB", "OPU2" and "OPU3" of the reference code.
        private_head: The head stays with the client, as in the reference code.
    """
    return Method(
        name="fedp3",
        source="Yi et al., FedP3, ICLR 2024, arXiv 2404.09816",
        ratio=ByCapability(),
        mask=PrunedOthers(layers, private_head=private_head),
        share=OwnLayers(count=layers, private_head=private_head),
        aggregate=Mean("uniform", over="holders"),
        personal=LocalModel("last"),
    )
