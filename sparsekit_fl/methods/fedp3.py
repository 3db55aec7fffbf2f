"""FedP3: each client owns a few layers, receives the others pruned, trains a submodel, and sends its own layers back.

Yi, Gazagnadou, Richtárik, Lyu: FedP3: Federated Personalized and Privacy-friendly Network Pruning under Model Heterogeneity,
ICLR 2024 (arXiv 2404.09816). The layers are assigned as by "OPU2" in the reference code: two that follow each other, cyclically
(by group of clients there, by client here, since its groups are those of a five-layer network); the others come pruned by
magnitude to 0.9 of their weights, and the head stays with the client. The reference code has no local pruning; of the paper's
strategies we take ordered dropout at the client's capability: the paper draws the local pruning at every step, and with one
ratio that is the same first units at every step, so the client trains one narrow model. As in the reference code, the weights
that arrive as zero train like the others.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from sparsekit.graph import Layer, StateDict, UnitGraph, WeightMask, head_entries, layer_weights, to_weights
from sparsekit_fl.methods.base import ClientContext, Method, Model, Problem, Result, ServerContext, Task, sgd
from sparsekit_fl.methods.client import keep_model, kept_model
from sparsekit_fl.methods.fedper import check_head
from sparsekit_fl.methods.masks import largest_weights
from sparsekit_fl.methods.submodels import prefix
from sparsekit_fl.options import Count, Ratio


@dataclass(frozen=True, kw_only=True)
class FedP3(Method):
    """Layer-wise sharing with pruning on both sides; each entry is averaged over the clients that send it.

    The client's own layers are sent whole, the others with their largest weights. The client trains the first units of every
    group, as many as its capability allows, and uploads the trained part of its own layers.

    Args:
        layers: Number of layers that a client owns; 1, 2 and 3 are "LowerB", "OPU2" and "OPU3" of the reference code. None:
            all.
        kept: Share of the weights of each other layer that is sent.
        private_head: The head stays with the client, as in the reference code.
    """

    source = "Yi et al., FedP3, ICLR 2024, arXiv 2404.09816"
    masked = True
    weights = "uniform"
    over = "holders"
    needs_units = True

    layers: Count | None = 2
    kept: Ratio = 0.9
    private_head: bool = True

    def check(self, problem: Problem, graph: UnitGraph) -> None:
        """Raise if the model has no units, or no head that can stay with a client."""
        super().check(problem, graph)
        if self.private_head:
            check_head(graph, 1)

    def private(self, graph: UnitGraph) -> Collection[str]:
        """Return the entries of the head."""
        return head_entries(graph.layers) if self.private_head else ()

    def own_layers(self, graph: UnitGraph, client_id: int) -> tuple[Layer, ...]:
        """Return the layers that a client owns, cyclically: client k begins at layer k modulo their number.

        A private head is left out, which is never sent.
        """
        layers = graph.layers[:-1] if self.private_head else graph.layers
        if self.layers is None or self.layers >= len(layers):
            return tuple(layers)
        return tuple(layers[(client_id + step) % len(layers)] for step in range(self.layers))

    def assign(self, server: ServerContext, client_id: int) -> Task:
        """Send the client's own layers whole, the others pruned."""
        mine = {name for layer in self.own_layers(server.graph, client_id) for name in layer.entries}
        names = [name for name in layer_weights(server.graph.layers, server.graph.shapes) if name not in mine]
        mask = largest_weights(server.state, names, self.kept) if names and self.kept < 1.0 else None
        return Task(mask=mask, ratio=server.roster[client_id].capability.ratio)

    def train(self, client: ClientContext, task: Task) -> Result:
        """Train the first units of every group, and upload those of the client's own layers."""
        graph = client.graph
        units = prefix(graph, task.ratio)
        result = sgd(client, replace(task, mask=units))
        keep_model(client, result, "last", task.ratio)
        mine = {name for layer in self.own_layers(graph, client.client.id) for name in layer.entries}
        shared = [name for name in graph.shapes if name not in self.private(graph)]
        trained = to_weights(graph, units)
        nothing = {name: torch.zeros(graph.shapes[name], dtype=torch.bool) for name in shared if name not in mine}
        upload = {**{name: trained[name] for name in shared if name in mine and name in trained}, **nothing}
        return replace(result, upload=WeightMask(upload))

    def deploy(self, client: ClientContext, state: StateDict) -> Model:
        """Return the client's own trained submodel."""
        return kept_model(client) or Model(state=state)
